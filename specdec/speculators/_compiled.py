"""A typed door to numba: what runs on every node of every step is compiled once and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from specdec.folders import cache_folder

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def _folder() -> str | None:
    """Where this version's machine code is kept; None if others could put theirs there: it is unpickled and run.

    numba notices a change in a function's own file only, not in the constants and functions that it takes from others;
    naming the folder after the contents of all of them does.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = cache_folder() / "compiled" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trusted = all(map(_belongs_to_the_user, (folder, folder.parent))) and not _open_to_all(cache_folder())
    except OSError as error:
        log.warning("%s cannot be used (%s): what is compiled is not kept for the next start", folder, error.strerror)
        return None
    if not trusted:
        log.warning("%s could be changed by others: what is compiled is not kept there, so every start takes longer", folder)
    return str(folder) if trusted else None


def _belongs_to_the_user(folder: Path) -> bool:
    """Whether nobody else may change what is in ``folder``; closes it to others if it is the user's own."""
    if not hasattr(os, "getuid"):  # Windows keeps a user's folders from other users
        return True
    if folder.stat().st_uid != os.getuid():
        return False
    folder.chmod(0o700)
    return True


def _open_to_all(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


_FOLDER = _folder()


def compiled(function: Function) -> Function:
    """Compile on first call for the argument types seen; releases the GIL."""
    options = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}
    if _FOLDER is None:
        return cast(Function, numba.njit(**options)(function))
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    finally:
        numba.config.CACHE_DIR = before
