"""From opinions to probabilities: a tiny network, learned online.

For a candidate c the *hidden* vector [H] sums one row per expert that knows the node and per opinion on c; a linear read-out of
its positive part is c's score. A softmax over all candidates and "none of them" gives the probability that the target picks
c, given that the node itself is accepted. Every committed token is a verdict and moves the weights by one step of gradient
descent on its log-loss, from a prior shipped with the package. Mixing experts in the logistic domain by online gradient
descent is what context-mixing compressors do (Mahoney, PAQ7, 2005).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.speculators._compiled import compiled
from specdec.speculators.candidates import EXPERTS, MOST_CANDIDATES, Opinions

HIDDEN = 16
# Rows of the weights [ROWS, HIDDEN], each block one row per expert.
SAYS = 0  # an opinion on the candidate exists
SHARE = EXPERTS  # times its log-share
RECENT = 2 * EXPERTS  # it is the most recent continuation
KNOWS = 3 * EXPERTS  # the expert knows the node
SEEN = 4 * EXPERTS  # times log(1 + how often it was met)
NONE_KNOWS = 5 * EXPERTS  # the same for "none of them" ...
NONE_SEEN = 6 * EXPERTS
NONE_TOP = 7 * EXPERTS  # ... times the expert's largest log-share
DEPTH, BIAS, READ, NONE_DEPTH, NONE_BIAS, NONE_READ = range(8 * EXPERTS, 8 * EXPERTS + 6)
ROWS = 8 * EXPERTS + 6
WEIGHTS_SHAPE = (ROWS, HIDDEN)
PRIOR = Path(__file__).with_name("prior.npy")
LOG_SCALE = np.float32(0.3)
DEPTH_SCALE = np.float32(0.2)
DEEPEST = 12


class Workspace(NamedTuple):
    """Room for one node: ``hidden`` float32 [candidates + 1, H], ``probs`` float32 [candidates + 1]; last, "none of them"."""

    hidden: NDArray[np.float32]
    probs: NDArray[np.float32]


@compiled
def empty_workspace() -> Workspace:
    """Room for the largest node."""
    return Workspace(np.zeros((MOST_CANDIDATES + 1, HIDDEN), np.float32), np.zeros(MOST_CANDIDATES + 1, np.float32))


@compiled
def add_row(into: NDArray[np.float32], row: NDArray[np.float32], scale: np.float32) -> None:
    """``into`` [H] += ``scale`` * ``row`` [H]."""
    for h in range(HIDDEN):
        into[h] += scale * row[h]


@compiled
def mix(weights: NDArray[np.float32], opinions: Opinions, depth: int, work: Workspace) -> None:
    """Probability of every candidate into ``work.probs``; of none of them into the entry after the last."""
    size = opinions.size[0]
    hidden = work.hidden
    deep = DEPTH_SCALE * np.float32(min(depth, DEEPEST))
    node = np.zeros(HIDDEN, np.float32)
    none = hidden[size]
    none[:] = 0
    add_row(node, weights[BIAS], np.float32(1))
    add_row(node, weights[DEPTH], deep)
    add_row(none, weights[NONE_BIAS], np.float32(1))
    add_row(none, weights[NONE_DEPTH], deep)
    for expert in range(EXPERTS):
        if opinions.seen[expert] > 0:
            seen = LOG_SCALE * np.log(np.float32(1) + opinions.seen[expert])
            top = LOG_SCALE * opinions.top[expert]
            for h in range(HIDDEN):
                node[h] += weights[KNOWS + expert, h] + seen * weights[SEEN + expert, h]
                none[h] += (
                    weights[NONE_KNOWS + expert, h]
                    + seen * weights[NONE_SEEN + expert, h]
                    + top * weights[NONE_TOP + expert, h]
                )
    for candidate in range(size):
        hidden[candidate, :] = node
    for i in range(opinions.size[1]):
        candidate = opinions.candidate[i]
        expert = opinions.expert[i]
        log_share = LOG_SCALE * opinions.log_share[i]
        recent = np.float32(opinions.recent[i])
        for h in range(HIDDEN):
            hidden[candidate, h] += (
                weights[SAYS + expert, h] + log_share * weights[SHARE + expert, h] + recent * weights[RECENT + expert, h]
            )
    largest = np.float32(-1e30)
    for row in range(size + 1):
        read = weights[READ] if row < size else weights[NONE_READ]
        score = np.float32(0)
        for h in range(HIDDEN):
            score += read[h] * max(hidden[row, h], np.float32(0))
        work.probs[row] = score
        largest = max(largest, score)
    total = np.float32(0)
    for row in range(size + 1):
        work.probs[row] = np.exp(work.probs[row] - largest)
        total += work.probs[row]
    for row in range(size + 1):
        work.probs[row] /= total


@compiled
def learn(weights: NDArray[np.float32], opinions: Opinions, depth: int, work: Workspace, truth: int, rate: float) -> None:
    """One gradient step after `mix`: candidate ``truth`` was right (the number after the last: none of them)."""
    size = opinions.size[0]
    deep = DEPTH_SCALE * np.float32(min(depth, DEEPEST))
    hidden = work.hidden
    node = np.zeros(HIDDEN, np.float32)
    step = np.float32(rate)
    for row in range(size + 1):  # turn hidden activations into steps against their gradients
        error = work.probs[row] - (np.float32(1) if row == truth else np.float32(0))
        read = weights[READ] if row < size else weights[NONE_READ]
        for h in range(HIDDEN):
            active = max(hidden[row, h], np.float32(0))
            change = -step * error * read[h] if active > 0 else np.float32(0)
            read[h] -= step * error * active
            hidden[row, h] = change
            if row < size:
                node[h] += change
    none = hidden[size]
    add_row(weights[BIAS], node, np.float32(1))
    add_row(weights[DEPTH], node, deep)
    add_row(weights[NONE_BIAS], none, np.float32(1))
    add_row(weights[NONE_DEPTH], none, deep)
    for expert in range(EXPERTS):
        if opinions.seen[expert] > 0:
            seen = LOG_SCALE * np.log(np.float32(1) + opinions.seen[expert])
            add_row(weights[KNOWS + expert], node, np.float32(1))
            add_row(weights[SEEN + expert], node, seen)
            add_row(weights[NONE_KNOWS + expert], none, np.float32(1))
            add_row(weights[NONE_SEEN + expert], none, seen)
            add_row(weights[NONE_TOP + expert], none, LOG_SCALE * opinions.top[expert])
    for i in range(opinions.size[1]):
        change = hidden[opinions.candidate[i]]
        expert = opinions.expert[i]
        add_row(weights[SAYS + expert], change, np.float32(1))
        add_row(weights[SHARE + expert], change, LOG_SCALE * opinions.log_share[i])
        if opinions.recent[i]:
            add_row(weights[RECENT + expert], change, np.float32(1))


def prior_weights() -> NDArray[np.float32]:
    """The weights shipped with the package, [ROWS, HIDDEN]; `specdec.speculators.fitting` makes them.

    Raises ValueError where the file does not hold such weights: compiled code reads them without checking bounds.
    """
    weights = np.load(PRIOR, allow_pickle=False)
    if weights.shape != WEIGHTS_SHAPE or weights.dtype.kind != "f" or not np.isfinite(weights).all():
        raise ValueError(f"{PRIOR} does not hold {ROWS} x {HIDDEN} finite weights; install the package again")
    prior: NDArray[np.float32] = weights.astype(np.float32)
    return prior
