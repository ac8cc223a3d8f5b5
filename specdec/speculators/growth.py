"""Best-first growth of a token tree, and what a verified tree teaches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.speculators._compiled import compiled
from specdec.speculators.candidates import MOST_CANDIDATES, Sources, candidate_of, empty_opinions, gather
from specdec.speculators.evidence import LONGEST, SEED, Evidence, blend, extend_key
from specdec.speculators.mixer import empty_workspace, learn, mix

LEAST_PROBABILITY = 5e-4  # a path less likely than this is not worth a place in the queue


@compiled
def suffix_at(
    context: NDArray[np.int64],
    size: int,
    node: int,
    token_ids: NDArray[np.int64],
    parents: NDArray[np.int64],
    suffix: NDArray[np.int64],
) -> int:
    """The last tokens before a child of ``node``, most recent first, into ``suffix``; returns how many.

    ``context`` [size] ends in the root, which is node 0.
    """
    length = 0
    while node > 0 and length < LONGEST:
        suffix[length] = token_ids[node]
        length += 1
        node = parents[node]
    position = size - 1
    while position >= 0 and length < LONGEST:
        suffix[length] = context[position]
        length += 1
        position -= 1
    return length


@compiled
def take_best(queue: NDArray[np.int64], size: int, scores: NDArray[np.float32]) -> int:
    """Take the best entry off the heap ``queue`` [size]."""
    best = queue[0]
    moved = queue[size - 1]
    hole = 0
    while 2 * hole + 1 < size - 1:
        child = 2 * hole + 1
        if child + 1 < size - 1 and scores[queue[child + 1]] > scores[queue[child]]:
            child += 1
        if scores[moved] >= scores[queue[child]]:
            break
        queue[hole] = queue[child]
        hole = child
    queue[hole] = moved
    return int(best)


@compiled
def put(queue: NDArray[np.int64], size: int, entry: int, scores: NDArray[np.float32]) -> None:
    """Put ``entry`` on the heap ``queue`` [size]."""
    hole = size
    while hole > 0:
        above = (hole - 1) // 2
        if scores[queue[above]] >= scores[entry]:
            break
        queue[hole] = queue[above]
        hole = above
    queue[hole] = entry


@compiled
def grow(
    weights: NDArray[np.float32],
    sources: Sources,
    context: NDArray[np.int64],
    size: int,
    deepest: int,
    branches: int,
    ends: NDArray[np.int64],
    worth: NDArray[np.float64],
    others: int,
    token_ids: NDArray[np.int64],
    parents: NDArray[np.int64],
    scores: NDArray[np.float32],
    kinds: NDArray[np.int8],
) -> tuple[int, int]:
    """Fill the tree arrays [budget + 1] below the root, most probable path first.

    Every node taken is expanded: its candidates join the queue under the product of the probabilities along their path, but for
    the tokens ``ends``; at most ``branches`` of a node's are taken, and none lies deeper than ``deepest``. Stops, after the
    first node, where the next one scores below its ``worth`` times the sum of all before it. Returns the number of nodes and
    the longest context match behind the root.
    """
    opinions, work = empty_opinions(), empty_workspace()
    budget = token_ids.shape[0] - 1
    room = (budget + 1) * MOST_CANDIDATES
    tokens = np.empty(room, np.int64)
    above = np.empty(room, np.int64)
    path_scores = np.empty(room, np.float32)
    origin = np.empty(room, np.int8)
    queue = np.empty(room, np.int64)
    depths = np.zeros(budget + 1, np.int64)
    children = np.zeros(budget + 1, np.int64)
    suffix = np.empty(LONGEST, np.int64)
    queued = 0
    made = 0
    match_length = 0
    token_ids[0] = context[size - 1]
    parents[0] = -1
    scores[0] = 1
    kinds[0] = 0
    count = 1
    node = 0
    expected = 1.0 + others
    while count <= budget:
        if depths[node] < deepest:
            length = suffix_at(context, size, node, token_ids, parents, suffix)
            match = gather(opinions, sources, suffix, length, depths[node] + 1)
            if node == 0:
                match_length = match
            mix(weights, opinions, depths[node] + 1, work)
            for end in ends:
                ending = candidate_of(opinions, end)
                if ending >= 0:
                    work.probs[ending] = 0
            least = LEAST_PROBABILITY / scores[node]
            for candidate in range(opinions.size[0]):
                if work.probs[candidate] >= least:
                    tokens[made] = opinions.tokens[candidate]
                    above[made] = node
                    path_scores[made] = scores[node] * min(work.probs[candidate], np.float32(1))
                    origin[made] = opinions.source[candidate]
                    put(queue, queued, made, path_scores)
                    queued += 1
                    made += 1
        taken = -1
        while queued > 0 and taken < 0:
            best = take_best(queue, queued, path_scores)
            queued -= 1
            if children[above[best]] < branches:
                taken = best
        if taken < 0:
            break
        if count > 1 and path_scores[taken] < worth[min(count, worth.shape[0] - 1)] * expected:
            break
        expected += path_scores[taken]
        token_ids[count] = tokens[taken]
        parents[count] = above[taken]
        children[above[taken]] += 1
        scores[count] = path_scores[taken]
        kinds[count] = origin[taken]
        depths[count] = depths[above[taken]] + 1
        node = count
        count += 1
    return count, match_length


@compiled
def learn_verdict(
    weights: NDArray[np.float32],
    sources: Sources,
    context: NDArray[np.int64],
    size: int,
    emitted: int,
    rate: float,
) -> None:
    """One gradient step per emitted token: ``context`` [size + emitted] holds the verdict after the root."""
    opinions, work = empty_opinions(), empty_workspace()
    suffix = np.empty(LONGEST, np.int64)
    for depth in range(emitted):
        length = suffix_at(context, size + depth, 0, context, context, suffix)
        gather(opinions, sources, suffix, length, depth + 1)
        if opinions.size[0] > 0:
            mix(weights, opinions, depth + 1, work)
            truth = candidate_of(opinions, context[size + depth])
            if truth < 0:
                truth = opinions.size[0]
            if work.probs[truth] >= 0:  # not NaN
                learn(weights, opinions, depth + 1, work, truth, rate)


@compiled
def recycle(
    evidence: Evidence,
    context: NDArray[np.int64],
    size: int,
    token_ids: NDArray[np.int64],
    parents: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    orders: NDArray[np.int64],
    floor: float,
) -> None:
    """Keep the target's next tokens ``tokens``, ``probs`` [N, K] after every node of a tree, rejected ones included."""
    for node in range(tokens.shape[0]):
        if not -1 <= parents[node] < node:
            return  # not a tree
    suffix = np.empty(LONGEST, np.int64)
    for node in range(tokens.shape[0]):
        available = suffix_at(context, size, node, token_ids, parents, suffix)
        key = SEED
        length = 0
        for order in orders:
            if order > available:
                break
            while length < order:
                key = extend_key(key, suffix[length])
                length += 1
            blend(evidence, key, tokens[node], probs[node], floor)
