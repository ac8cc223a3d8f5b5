"""What has followed what: a fixed-size table from the last few tokens to the tokens seen next.

One entry per *key*, the hash of the last ``order`` tokens, holds up to `SLOTS` next tokens, each with its *share*: a running
mean of the evidence for it. The evidence is either a token that did follow (`tally`: an n-gram count) or the target's own
probabilities (`blend`: Token Recycling, arXiv 2408.08696, keyed by more than the last token). Both are one rule::

    share <- (1 - rate) * share + rate * evidence,   rate = max(1 / (times seen + 1), floor)

so that floor 0 is the plain mean and a larger floor forgets the old. The table is set-associative: a key lives in one of `WAYS`
neighbouring entries and evicts the one not touched for longest, so memory and time per token are bounded for good.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.speculators._compiled import compiled

SLOTS = 8
WAYS = 8
LONGEST = 16  # the most tokens a key may stand for
SEED = np.uint64(0x2545F4914F6CDD1D)


class Evidence(NamedTuple):
    """The arrays of one table of ``entries`` (a power of two) keys.

    ``keys`` uint64 [entries], 0 where empty; ``tokens`` int32 [entries, SLOTS], -1 where empty; ``shares`` float32 [entries,
    SLOTS]; ``seen`` float32 [entries], how often the key was met; ``touched`` int64 [entries], the clock when it was last met;
    ``clock`` int64 [1].
    """

    keys: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    shares: NDArray[np.float32]
    seen: NDArray[np.float32]
    touched: NDArray[np.int64]
    clock: NDArray[np.int64]


def empty_evidence(entries: int) -> Evidence:
    """A table with room for at least ``entries`` keys."""
    size = 1 << max(entries - 1, WAYS - 1).bit_length()
    return Evidence(
        np.zeros(size, np.uint64),
        np.zeros((size, SLOTS), np.int32),
        np.zeros((size, SLOTS), np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.int64),
        np.zeros(1, np.int64),
    )


@compiled
def extend_key(key: np.uint64, token: int) -> np.uint64:
    """The key of one token more, further back; start from `SEED`. Never 0 in practice."""
    key = (key ^ (np.uint64(token) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    return key ^ (key >> np.uint64(29))


@compiled
def find(keys: NDArray[np.uint64], key: np.uint64) -> int:
    """The entry of a table with these ``keys`` that holds ``key``, or -1."""
    mask = np.uint64(keys.shape[0] - 1)
    for way in range(WAYS):
        entry = np.int64((key + np.uint64(way)) & mask)
        if keys[entry] == key:
            return int(entry)
        if keys[entry] == 0:  # entries fill in order and are never emptied
            break
    return -1


@compiled
def claim(evidence: Evidence, key: np.uint64) -> int:
    """The entry that holds ``key``: its own, else an empty one, else the one not touched for longest, emptied."""
    mask = np.uint64(evidence.keys.shape[0] - 1)
    oldest = np.int64(key & mask)
    for way in range(WAYS):
        entry = np.int64((key + np.uint64(way)) & mask)
        if evidence.keys[entry] == key:
            return int(entry)
        if evidence.touched[entry] < evidence.touched[oldest]:
            oldest = entry
    evidence.keys[oldest] = key
    evidence.tokens[oldest, :] = -1
    evidence.shares[oldest, :] = 0
    evidence.seen[oldest] = 0
    return int(oldest)


@compiled
def meet(evidence: Evidence, key: np.uint64, floor: float) -> tuple[int, np.float32]:
    """The entry of ``key``, its shares faded to make room, and the weight of the new evidence."""
    entry = claim(evidence, key)
    rate = np.float32(max(1.0 / (evidence.seen[entry] + 1.0), floor))
    for slot in range(SLOTS):
        evidence.shares[entry, slot] *= np.float32(1) - rate
    evidence.seen[entry] += np.float32(1)
    evidence.clock[0] += 1
    evidence.touched[entry] = evidence.clock[0]
    return entry, rate


@compiled
def blend(evidence: Evidence, key: np.uint64, tokens: NDArray[np.int32], probs: NDArray[np.float32], floor: float) -> None:
    """The target gave ``tokens`` [K] the probabilities ``probs`` [K] after ``key``; the weakest slots give way."""
    entry, rate = meet(evidence, key, floor)
    for i in range(min(tokens.shape[0], SLOTS)):
        share = rate * probs[i]
        weakest = 0
        own = -1
        for slot in range(SLOTS):
            if evidence.tokens[entry, slot] == tokens[i]:
                own = slot
                break
            if evidence.shares[entry, slot] < evidence.shares[entry, weakest]:
                weakest = slot
        if own >= 0:
            evidence.shares[entry, own] += share
        elif share > evidence.shares[entry, weakest]:
            evidence.tokens[entry, weakest] = tokens[i]
            evidence.shares[entry, weakest] = share


@compiled
def tally(evidence: Evidence, key: np.uint64, token: int, floor: float) -> None:
    """``token`` followed ``key``. Slots are kept most recent first; the least recent gives way."""
    entry, rate = meet(evidence, key, floor)
    slot = 0
    while slot < SLOTS - 1 and evidence.tokens[entry, slot] != token and evidence.tokens[entry, slot] >= 0:
        slot += 1
    share = evidence.shares[entry, slot] if evidence.tokens[entry, slot] == token else np.float32(0)
    for later in range(slot, 0, -1):
        evidence.tokens[entry, later] = evidence.tokens[entry, later - 1]
        evidence.shares[entry, later] = evidence.shares[entry, later - 1]
    evidence.tokens[entry, 0] = token
    evidence.shares[entry, 0] = share + rate


@compiled
def tally_text(
    evidence: Evidence, token_ids: NDArray[np.int64], start: int, stop: int, orders: NDArray[np.int64], floor: float
) -> None:
    """Tokens ``start`` to ``stop`` each follow what stands before them, under every order (ascending)."""
    for position in range(start, stop):
        key = SEED
        length = 0
        for order in orders:
            if order > position:
                break
            while length < order:
                length += 1
                key = extend_key(key, token_ids[position - length])
            tally(evidence, key, token_ids[position], floor)


@compiled
def blend_text(
    evidence: Evidence,
    token_ids: NDArray[np.int64],
    start: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    orders: NDArray[np.int64],
    floor: float,
) -> None:
    """``tokens``, ``probs`` [N, K]: the target's next tokens after positions ``start`` .. ``start + N``."""
    for row in range(tokens.shape[0]):
        key = SEED
        length = 0
        for order in orders:
            if order > start + row + 1:
                break
            while length < order:
                key = extend_key(key, token_ids[start + row - length])
                length += 1
            blend(evidence, key, tokens[row], probs[row], floor)
