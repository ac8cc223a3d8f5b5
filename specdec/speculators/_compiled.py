"""A typed door to numba: what runs on every node of every step is compiled once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from specdec.folders import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])


def _folder() -> str:
    """Where this version's machine code is kept.

    numba notices a change in a function's own file only, not in the constants and functions that it takes from others;
    naming the folder after the contents of all of them does.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return str(cache_folder() / "compiled" / digest.hexdigest()[:16])


_FOLDER = _folder()


def compiled(function: Function) -> Function:
    """Compile on first call for the argument types seen; releases the GIL."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER
    try:
        jit = numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz", "arcp"})
        return cast(Function, jit(function))
    finally:
        numba.config.CACHE_DIR = before
