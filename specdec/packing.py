"""Packed weights: on a CPU, linear layers read their weights in the order in which oneDNN multiplies.

A plain weight is brought into that order in every call, which for the few rows of a token tree takes as long as multiplying.
Packed once, it gives the same product. Measured on two cores (576 -> 1536, bfloat16): a row 0.069 -> 0.037 ms, 12 rows
0.083 -> 0.057; in float32 0.209 -> 0.087 and 0.305 -> 0.101.

It is in force during the target's passes only: the model keeps its own weights and forward, so that packed weights take their
size in memory once more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from specdec.devices import free_bytes, gpu_is_lent
from specdec.errors import first_line
from specdec.weights import state

_ROWS = 16
"""The rows that the order is chosen for: a token tree's, on a CPU."""

log = logging.getLogger(__name__)


class PackedWeights:
    """The packed linear layers of ``model`` on the CPU: all, or none where that is not faster or memory is short.

    None either where the model will move to a lent GPU: there it would never multiply with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packed: list[tuple[dict[str, Any], _PackedLinear]] = []
        try:
            self._packed = _packed(model)
        except (AttributeError, RuntimeError) as error:  # an operator that this build of torch or this processor lacks
            log.info("Weights are not packed: %s.", first_line(error))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the layers multiply so meanwhile; not under autocast, which chooses a dtype for each product."""
        if torch.is_autocast_enabled("cpu"):
            yield
            return
        for attributes, packed in self._packed:
            attributes["forward"] = packed
        try:
            yield
        finally:
            for attributes, _ in self._packed:
                attributes.pop("forward", None)  # another engine over the same model may have been faster


class _PackedLinear:
    """Stands for the forward of ``layer``; a weight that was changed, converted or exchanged is packed anew.

    Changed as `state` sees it: a write through ``weight.data`` or a numpy view of it is not seen.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._pack(layer.weight)

    def _pack(self, weight: Tensor) -> None:
        self._seen, self._state = weight.detach(), state(weight)  # which is kept, so that no other gets its address
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._seen, _ROWS) if _fits(weight) else None

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` [..., in] -> [..., out]."""
        layer = self._layer
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is not None and state(weight) != self._state:
            self._pack(weight)
        if weight is None or self._packed is None or rows.dtype != weight.dtype:  # pruned, reparametrised, converted ...
            return type(layer).forward(layer, rows)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return product


def _packed(model: nn.Module) -> list[tuple[dict[str, Any], _PackedLinear]]:
    """Attributes and stand-in of each layer that is to be packed. Raises AttributeError or RuntimeError where none can be."""
    if gpu_is_lent() or not torch._C._has_mkldnn:
        return []
    layers = [module for module in model.modules() if _can_be_packed(module)]
    size, free = sum(layer.weight.nbytes for layer in layers), free_bytes(torch.device("cpu"))
    if 2 * size > free:
        log.info("Weights are not packed: that takes %.1f GB, and %.1f GB are free.", size / 1e9, free / 1e9)
        return []
    if not layers or not _is_faster(max(layers, key=lambda layer: layer.weight.numel())):
        return []
    return [(vars(layer), _PackedLinear(layer)) for layer in layers]


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a plain linear layer that nobody else has a forward for."""
    return type(module) is nn.Linear and "forward" not in vars(module) and _fits(module.weight)


def _fits(weight: Tensor) -> bool:
    """Whether it lies on the CPU, in a dtype that oneDNN multiplies here."""
    if weight.device.type != "cpu" or weight.is_inference():  # of which nobody knows when it was written to
        return False
    return weight.dtype == torch.float32 or bool(
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _is_faster(layer: nn.Linear) -> bool:
    """Measured on this machine; the two take turns, so that what else runs weighs on both alike."""
    rows = torch.ones(1, _ROWS, layer.in_features, dtype=layer.weight.dtype)
    ways: list[Callable[[Tensor], Tensor]] = [layer, _PackedLinear(layer)]
    best = [math.inf, math.inf]
    with torch.inference_mode():
        for _ in range(8):
            for way, multiply in enumerate(ways):
                start = time.perf_counter()
                multiply(rows)
                best[way] = min(best[way], time.perf_counter() - start)
    return best[1] < best[0]
