"""Tree-speculative decoding for any Hugging Face causal language model.

`SpeculativeEngine` is the door; the `Step` it yields is what everything else consumes. A name is imported when it is first
asked for, with what it needs: `Step` alone brings no model library, `tree_figure` alone brings the drawing library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.draw import to_networkx, tree_figure
    from specdec.engine import Conversation, ConversationBusyError, SpeculativeEngine
    from specdec.errors import LoadError, MemoryFullError, NotANumberError, PromptError
    from specdec.request import RequestError
    from specdec.step import Step
    from specdec.target import UnsupportedModelError

__all__ = [
    "Conversation",
    "ConversationBusyError",
    "LoadError",
    "MemoryFullError",
    "NotANumberError",
    "PromptError",
    "RequestError",
    "SpeculativeEngine",
    "Step",
    "UnsupportedModelError",
    "to_networkx",
    "tree_figure",
]

_HOMES = {
    "draw": ("to_networkx", "tree_figure"),
    "engine": ("Conversation", "ConversationBusyError", "SpeculativeEngine"),
    "errors": ("LoadError", "MemoryFullError", "NotANumberError", "PromptError"),
    "request": ("RequestError",),
    "step": ("Step",),
    "target": ("UnsupportedModelError",),
}
"""The modules that hold the names above."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"specdec.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
