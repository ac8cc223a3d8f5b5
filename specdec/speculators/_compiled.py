"""A typed door to numba: what runs on every node of every step is compiled once and cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile on first call for the argument types seen; releases the GIL."""
    return cast(Function, numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz", "arcp"})(function))
