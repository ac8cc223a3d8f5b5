"""Tables on disk: one file of named arrays, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.typing import NDArray

from specdec.speculators._compiled import compiled
from specdec.speculators.evidence import SLOTS, Evidence, claim

Arrays = dict[str, NDArray[Any]]


def pack(evidence: Evidence, name: str) -> Arrays:
    """The entries in use, in the order in which they were last met, as arrays named ``name``.*."""
    used = np.flatnonzero(evidence.keys)
    used = used[np.argsort(evidence.touched[used], kind="stable")]
    return {
        f"{name}.keys": evidence.keys[used],
        f"{name}.tokens": evidence.tokens[used],
        f"{name}.shares": evidence.shares[used],
        f"{name}.seen": evidence.seen[used],
    }


def unpack(arrays: Arrays, name: str, evidence: Evidence) -> None:
    """Put what `pack` gave into an empty table of any size; where it is too small, what was met last stays."""
    keys, tokens = arrays[f"{name}.keys"], arrays[f"{name}.tokens"]
    shares, seen = arrays[f"{name}.shares"], arrays[f"{name}.seen"]
    rows = keys.size
    if [array.shape for array in (keys, tokens, shares, seen)] != [(rows,), (rows, SLOTS), (rows, SLOTS), (rows,)]:
        raise ValueError(f"the arrays of {name!r} do not fit together")
    if "".join(array.dtype.kind for array in (keys, tokens, shares, seen)) != "uiff":
        raise ValueError(f"the arrays of {name!r} hold other kinds of numbers")
    if not all(np.isfinite(array).all() and (array >= 0).all() for array in (shares, seen)):
        raise ValueError(f"{name!r} holds numbers that are negative or not finite")
    _insert(
        evidence,
        keys.astype(np.uint64),
        tokens.astype(np.int32),
        shares.astype(np.float32),
        seen.astype(np.float32),
    )


@compiled
def _insert(
    evidence: Evidence,
    keys: NDArray[np.uint64],
    tokens: NDArray[np.int32],
    shares: NDArray[np.float32],
    seen: NDArray[np.float32],
) -> None:
    for row in range(keys.shape[0]):
        entry = claim(evidence, keys[row])
        evidence.tokens[entry] = tokens[row]
        evidence.shares[entry] = shares[row]
        evidence.seen[entry] = seen[row]
        evidence.clock[0] += 1
        evidence.touched[entry] = evidence.clock[0]


def save_arrays(path: str | os.PathLike[str], arrays: Arrays, compress: bool = True) -> None:
    """Write ``arrays`` to ``path``; a reader sees the old file or the new one, never half of one.

    Only the user may read the file. Without ``compress`` the file is about three times as large and written ten times as fast.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{target.name}.*.partial"):
        writer = left.name.split(".")[-2]
        if not (writer.isdecimal() and psutil.pid_exists(int(writer))):  # it was killed meanwhile
            left.unlink(missing_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", opener=_for_the_user_alone) as file:
            (np.savez_compressed if compress else np.savez)(file, allow_pickle=False, **arrays)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_arrays(path: str | os.PathLike[str]) -> Arrays:
    """What `save_arrays` wrote; ValueError where the file holds something else."""
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except Exception as error:  # which one depends on what is damaged: the archive, a header, an array, a place to seek
            raise ValueError(f"{path} is damaged or not one of our files ({type(error).__name__}: {error})") from error


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used, so that nothing writes over it; its new name."""
    return path.replace(path.with_name(f"{path.name}.damaged"))


def _for_the_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
