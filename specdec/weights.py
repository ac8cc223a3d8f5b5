"""Weights: what tells whether a model still has the weights that it had."""

from __future__ import annotations

from torch import Tensor, nn

_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""What an adapter layer of PEFT computes depends on besides its weights."""


def state(weight: Tensor) -> tuple[int, int]:
    """Another one once ``weight`` was written to so that torch counts it, or got new data."""
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


def states(model: nn.Module) -> list[object]:
    """Other ones once a weight of ``model`` was changed, as `state` sees it, or an adapter was switched on, off or over.

    Quantised weights are buffers.
    """
    switches = [
        repr([getattr(module, name, None) for name in _SWITCHES])
        for module in model.modules()
        if hasattr(module, "_disable_adapters")
    ]
    return [*map(state, model.parameters()), *map(state, model.buffers()), *switches]
