"""Every source's opinion on what follows a node.

An *expert* is one source at one order: "the last three tokens, in this conversation's text", "the last token, in the
target's own recycled logits", ... An expert that knows the node's key holds up to `SLOTS` candidates with a share each. The
union of all experts' candidates is what a node's children are chosen from; the mixer turns the opinions into probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.speculators._compiled import compiled
from specdec.speculators.evidence import LONGEST, SEED, SLOTS, Evidence, empty_evidence, extend_key, find
from specdec.tree import Source

CONTEXT, RECYCLED, MEMORY_TEXT, MEMORY_LOGITS, VOCABULARY = range(5)
FAMILIES = 5
ORDERS = (
    (1, 2, 3, 4, 5, 6, 8, 12, 16),  # CONTEXT: n-grams of the prompt and the reply
    (1, 2, 3, 4),  # RECYCLED: the target's logits in this conversation
    (2, 3, 4, 6),  # MEMORY_TEXT: n-grams of earlier conversations and texts handed over
    (1, 2, 3, 4),  # MEMORY_LOGITS: the target's logits in earlier conversations
    (1, 2, 3),  # VOCABULARY: the target's logits on text of its own, made once per model
)
FIRST_EXPERT = np.cumsum([0] + [len(orders) for orders in ORDERS])
ORDER_TABLE = np.array([orders + (0,) * (len(ORDERS[0]) - len(orders)) for orders in ORDERS], np.int64)
PREVIOUS = int(FIRST_EXPERT[-1])  # the logits that emitted the root, as guesses for 1, 2, 3 tokens later (LogitSpec)
PREVIOUS_DEPTHS = 3
PREVIOUS_NEW = 12  # how many of them may become candidates by themselves
EXPERTS = PREVIOUS + PREVIOUS_DEPTHS
EXPERT_SOURCE = np.array(
    [Source.CONTEXT] * len(ORDERS[CONTEXT])
    + [Source.RECYCLED] * len(ORDERS[RECYCLED])
    + [Source.MEMORY] * (len(ORDERS[MEMORY_TEXT]) + len(ORDERS[MEMORY_LOGITS]))
    + [Source.VOCABULARY] * len(ORDERS[VOCABULARY])
    + [Source.RECYCLED] * PREVIOUS_DEPTHS,
    np.int8,
)
MOST_CANDIDATES = 64
MOST_OPINIONS = 320
HASHED = 256


class Sources(NamedTuple):
    """What may be asked: one table per family (an absent one is empty), and the last logits seen.

    ``previous_tokens`` int32 [K], ``previous_probs`` float32 [K]: the target's next tokens where the root was emitted.
    """

    tables: tuple[Evidence, ...]
    longest: int
    vocab_size: int
    previous_tokens: NDArray[np.int32]
    previous_probs: NDArray[np.float32]


class Opinions(NamedTuple):
    """The answer for one node, reused from node to node.

    ``size`` int64 [2]: number of candidates, of opinions. ``tokens`` int32 [candidates]; ``source`` int8 [candidates]: the
    source of the largest log-share, ``strongest`` float32 [candidates]. Opinion j: ``expert[j]`` gives
    candidate ``candidate[j]`` the log-share ``log_share[j]``; ``recent[j]``: it is what that expert saw last (text only).
    ``seen`` float32 [EXPERTS]: how often each expert met the key (0: never); ``top`` float32 [EXPERTS]: its largest log-share.
    ``hash_stamp``, ``hash_candidate`` [HASHED]: where a token stands among the candidates; ``stamp`` [1]: this node's.
    """

    size: NDArray[np.int64]
    tokens: NDArray[np.int32]
    source: NDArray[np.int8]
    strongest: NDArray[np.float32]
    candidate: NDArray[np.int32]
    expert: NDArray[np.int32]
    log_share: NDArray[np.float32]
    recent: NDArray[np.uint8]
    seen: NDArray[np.float32]
    top: NDArray[np.float32]
    hash_stamp: NDArray[np.int64]
    hash_candidate: NDArray[np.int32]
    stamp: NDArray[np.int64]


@compiled
def empty_opinions() -> Opinions:
    """Room for one node's candidates."""
    return Opinions(
        np.zeros(2, np.int64),
        np.zeros(MOST_CANDIDATES, np.int32),
        np.zeros(MOST_CANDIDATES, np.int8),
        np.zeros(MOST_CANDIDATES, np.float32),
        np.zeros(MOST_OPINIONS, np.int32),
        np.zeros(MOST_OPINIONS, np.int32),
        np.zeros(MOST_OPINIONS, np.float32),
        np.zeros(MOST_OPINIONS, np.uint8),
        np.zeros(EXPERTS, np.float32),
        np.zeros(EXPERTS, np.float32),
        np.zeros(HASHED, np.int64),
        np.zeros(HASHED, np.int32),
        np.zeros(1, np.int64),
    )


NOTHING = empty_evidence(1)


@compiled
def place_of(stamps: NDArray[np.int64], numbers: NDArray[np.int32], tokens: NDArray[np.int32], stamp: int, token: int) -> int:
    """The place in the hash table where ``token`` stands, under this node's ``stamp``, or would stand."""
    place = ((np.int64(token) * 2654435761) >> 20) & (HASHED - 1)
    while stamps[place] == stamp and tokens[numbers[place]] != token:
        place = (place + 1) & (HASHED - 1)
    return int(place)


@compiled
def candidate_of(opinions: Opinions, token: int) -> int:
    """The number of ``token`` among the candidates; -1 if it is not one."""
    stamp = opinions.stamp[0]
    place = place_of(opinions.hash_stamp, opinions.hash_candidate, opinions.tokens, stamp, token)
    return int(opinions.hash_candidate[place]) if opinions.hash_stamp[place] == stamp else -1


@compiled
def hear(
    opinions: Opinions,
    expert: int,
    given: NDArray[np.int32],
    shares: NDArray[np.float32],
    vocab_size: int,
    new: int,
    recent: bool,
) -> None:
    """``expert`` gives each of the tokens ``given`` [K] its share; the first ``new`` of them may become candidates by that.

    ``recent``: the first of them is what it saw last.
    """
    tokens, stamps, numbers, stamp = opinions.tokens, opinions.hash_stamp, opinions.hash_candidate, opinions.stamp[0]
    strongest, source = opinions.strongest, opinions.source  # out of the tuple once, not at every use: each is counted
    candidates, experts, log_shares, recents = opinions.candidate, opinions.expert, opinions.log_share, opinions.recent
    size, count = opinions.size[0], opinions.size[1]
    top = opinions.top[expert]
    for i in range(given.shape[0]):
        token = given[i]
        if token < 0 or token >= vocab_size or count >= MOST_OPINIONS:
            continue
        place = place_of(stamps, numbers, tokens, stamp, token)
        if stamps[place] != stamp:
            if i >= new or size >= MOST_CANDIDATES:
                continue
            stamps[place] = stamp
            numbers[place] = size
            tokens[size] = token
            strongest[size] = -np.inf
            size += 1
        candidate = numbers[place]
        log_share = np.log(max(shares[i], np.float32(1e-4)))
        candidates[count] = candidate
        experts[count] = expert
        log_shares[count] = log_share
        recents[count] = recent and i == 0
        count += 1
        top = max(top, log_share)
        if log_share > strongest[candidate]:
            strongest[candidate] = log_share
            source[candidate] = EXPERT_SOURCE[expert]
    opinions.top[expert] = top
    opinions.size[0] = size
    opinions.size[1] = count


@compiled
def gather(opinions: Opinions, sources: Sources, suffix: NDArray[np.int64], length: int, depth: int) -> int:
    """Ask every expert what follows ``suffix`` [length], most recent token first, for a child ``depth`` below the root.

    The memory is written while the conversation goes on: where it has met a key no more often than the conversation itself,
    it would only repeat what the conversation's own tables say, and is not asked.
    Returns the length of the longest match in the conversation's own text.
    """
    opinions.stamp[0] += 1
    opinions.size[:] = 0
    opinions.seen[:] = 0
    opinions.top[:] = np.float32(-9.5)
    keys = np.empty(LONGEST + 1, np.uint64)
    keys[0] = SEED
    for order in range(1, length + 1):
        keys[order] = extend_key(keys[order - 1], suffix[order - 1])
    entries = np.empty(ORDER_TABLE.shape[1], np.int64)
    met_here = np.zeros((2, LONGEST + 1), np.float32)  # by CONTEXT and RECYCLED
    longest_match = 0
    for family in range(FAMILIES):
        evidence = sources.tables[family]
        if evidence.clock[0] == 0:
            continue
        first = FIRST_EXPERT[family]
        known = 0  # who knows a longer key knows the shorter ones: stop at the first that is not there
        while known < FIRST_EXPERT[family + 1] - first:
            order = ORDER_TABLE[family, known]
            if order > length or (family == CONTEXT and order > sources.longest):
                break
            entries[known] = find(evidence.keys, keys[order])
            if entries[known] < 0:
                break
            known += 1
        if family == CONTEXT and known > 0:
            longest_match = ORDER_TABLE[family, known - 1]
        for i in range(known - 1, -1, -1):
            entry = entries[i]
            order = ORDER_TABLE[family, i]
            seen = evidence.seen[entry]
            if family in (CONTEXT, RECYCLED):
                met_here[family, order] = seen
            elif family != VOCABULARY and seen <= met_here[family - MEMORY_TEXT, order]:
                continue
            opinions.seen[first + i] = seen
            is_text = family in (CONTEXT, MEMORY_TEXT)
            hear(opinions, first + i, evidence.tokens[entry], evidence.shares[entry], sources.vocab_size, SLOTS, is_text)
    if depth <= PREVIOUS_DEPTHS and sources.previous_tokens.shape[0] > 0:
        expert = PREVIOUS + depth - 1
        opinions.seen[expert] = 1
        hear(opinions, expert, sources.previous_tokens, sources.previous_probs, sources.vocab_size, PREVIOUS_NEW, False)
    return int(longest_match)
