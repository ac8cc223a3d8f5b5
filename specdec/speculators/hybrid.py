"""HybridSpeculator: context, recycled logits, memory and vocabulary in one tree under one calibrated score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.speculators import DraftRequest, Proposal, TopK
from specdec.speculators.candidates import (
    CONTEXT,
    MEMORY_TEXT,
    NOTHING,
    ORDERS,
    RECYCLED,
    Sources,
)
from specdec.speculators.evidence import LONGEST, Evidence, blend_text, empty_evidence, tally_text
from specdec.speculators.growth import grow, learn_verdict, recycle
from specdec.speculators.memory import Memory
from specdec.speculators.mixer import prior_weights
from specdec.speculators.vocabulary import Vocabulary
from specdec.tree import TokenTree, common_length

CONTEXT_KEYS = 1 << 17  # room for about 14 000 tokens of text; beyond that the stalest keys go
RECYCLED_KEYS = 1 << 16
RECYCLED_FLOOR = 0.5  # the newest logits weigh at least this much
TOP_K = 32
ANY_ID = 2**31 - 1
LEARNING_RATE = 0.001
TEXT_ORDERS = np.array(ORDERS[CONTEXT], np.int64)
MEMORY_ORDERS = np.array(ORDERS[MEMORY_TEXT], np.int64)
LOGIT_ORDERS = np.array(ORDERS[RECYCLED], np.int64)
NO_GUESSES = np.zeros(0, np.int32), np.zeros(0, np.float32)


class HybridSpeculator:
    """One conversation's speculator (the `Speculator` protocol).

    ``n``: the longest context match in tokens. ``gamma``: the deepest branch. ``vocab_size``: no id from it on is proposed.
    ``memory`` and ``vocabulary`` are shared by all conversations with one model; None leaves them out. ``recycling=False``
    ignores the target's logits. ``learning_rate``: how fast the mixer follows the verdicts; with a memory, what it learns is
    the memory's. ``prior``: the mixer's weights to begin with, unless there is a memory; None: those of the package.
    """

    def __init__(
        self,
        *,
        n: int = LONGEST,
        gamma: int = 24,
        vocab_size: int = ANY_ID,
        memory: Memory | None = None,
        vocabulary: Vocabulary | None = None,
        recycling: bool = True,
        learning_rate: float = LEARNING_RATE,
        prior: NDArray[np.float32] | None = None,
    ) -> None:
        if not 1 <= n <= LONGEST:
            raise ValueError(f"n, the longest context match, must lie between 1 and {LONGEST}, not {n}")
        if gamma < 1:
            raise ValueError(f"gamma, the deepest branch, must be at least 1, not {gamma}")
        self.n = n
        self.gamma = gamma
        self.vocab_size = vocab_size
        self.memory = memory
        self.vocabulary = vocabulary
        self.learning_rate = float(learning_rate)
        self.top_k = TOP_K if recycling else 0
        self._weights = prior_weights() if prior is None else prior.copy()
        self._recycled = empty_evidence(RECYCLED_KEYS) if recycling else NOTHING
        self._orders = TEXT_ORDERS[n >= TEXT_ORDERS]
        self._tokens = np.zeros(1024, np.int64)
        self._forget()

    def begin(self, token_ids: Sequence[int], top: TopK | None, start: int) -> None:
        """The committed context is now exactly ``token_ids``; ``top``, where given, belongs to the positions from ``start`` on.

        What it shares with the context so far is kept; a context that was rewound or edited is indexed anew.
        """
        new = np.asarray(token_ids, np.int64)
        shared = common_length(self._tokens[: self._size], new)
        if shared < self._size:
            self._forget()
            self._append(new[:shared], remember=False)
        self._append(new[shared:], remember=True)
        self._previous = NO_GUESSES
        if top is None or not self.top_k or not 0 <= start < self._size:
            return
        ids, probs = _readable(top, self._size - start)
        for evidence, floor in self._logit_tables():
            blend_text(evidence, self._tokens, start, ids, probs, LOGIT_ORDERS, floor)
        if 0 < start + len(ids) == self._size - 1 and len(ids):
            self._previous = ids[-1], probs[-1]

    def expect(self, token_ids: Sequence[int]) -> None:
        """Let guesses be copied from ``token_ids``, as if they had followed the context once before."""
        self._reserve(len(token_ids))
        start, stop = self._size, self._size + len(token_ids)
        self._tokens[start:stop] = token_ids
        tally_text(self._context, self._tokens, start, stop, self._orders, 0.0)

    def propose(self, request: DraftRequest) -> Proposal:
        """The tree within ``request`` whose path probabilities have the largest sum."""
        if not self._size:
            raise ValueError("nothing to continue: begin() was not given any tokens")
        nodes = max(request.budget, 0) + 1
        token_ids, parents = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
        scores, origins = np.zeros(nodes, np.float32), np.zeros(nodes, np.int8)
        count, match_length = grow(
            self._mixer_weights(),
            self._sources(),
            self._tokens,
            self._size,
            self.gamma if request.depth is None else min(self.gamma, request.depth),
            nodes if request.branches is None else request.branches,
            np.array(list(request.ends), np.int64),
            np.zeros(nodes) if request.worth is None else request.worth,
            request.others,
            token_ids,
            parents,
            scores,
            origins,
        )
        tree = TokenTree(token_ids[:count], parents[:count], scores[:count], origins[:count])
        return Proposal(tree, match_length)

    def observe(self, tree: TokenTree, path: Sequence[int], emitted: Sequence[int], top: TopK | None) -> None:
        """One verified pass: calibrate on the verdict, keep the target's view of every node, append what was emitted."""
        size, added = self._size, len(emitted)
        self._reserve(added)
        self._tokens[size : size + added] = emitted
        self._learn(size, added)
        self._previous = NO_GUESSES
        if top is not None and self.top_k:
            self._recycle(tree, top, path[min(added, len(path)) - 1] if added and len(path) else -1)
        self._append(self._tokens[size : size + added], remember=True)

    def _learn(self, size: int, added: int) -> None:
        """The ``added`` tokens behind the context's ``size`` are the target's verdict: one gradient step for each."""
        learn_verdict(
            self._mixer_weights(),
            self._sources(),
            self._tokens,
            size,
            added,
            self.learning_rate,
        )

    def _recycle(self, tree: TokenTree, top: TopK, emitter: int) -> None:
        """Keep ``top`` for every node; ``emitter`` is the node after which the new root was emitted."""
        ids, probs = _readable(top, min(len(tree), len(tree.parents)))
        for evidence, floor in self._logit_tables():
            recycle(
                evidence,
                self._tokens,
                self._size,
                tree.token_ids,
                tree.parents,
                ids,
                probs,
                LOGIT_ORDERS,
                floor,
            )
        if 0 <= emitter < len(ids):
            self._previous = ids[emitter], probs[emitter]

    def _sources(self) -> Sources:
        memory = (NOTHING, NOTHING) if self.memory is None else (self.memory.text, self.memory.logits)
        vocabulary = NOTHING if self.vocabulary is None else self.vocabulary.logits
        return Sources((self._context, self._recycled, *memory, vocabulary), self.n, self.vocab_size, *self._previous)

    def _mixer_weights(self) -> NDArray[np.float32]:
        return self._weights if self.memory is None else self.memory.weights

    def _logit_tables(self) -> Iterator[tuple[Evidence, float]]:
        """The tables that keep the target's logits, with their floors."""
        yield self._recycled, RECYCLED_FLOOR
        if self.memory is not None:
            yield self.memory.logits, self.memory.FLOOR

    def _forget(self) -> None:
        """No context. Recycled logits stay: what the target said about a few tokens is no less true after a rewind."""
        self._context = empty_evidence(CONTEXT_KEYS)
        self._size = 0
        self._previous = NO_GUESSES

    def _reserve(self, added: int) -> None:
        if self._size + added > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(self._size + added, np.int64)])

    def _append(self, new: NDArray[np.int64], *, remember: bool) -> None:
        """Index ``new`` behind the context, and in the memory if it is to ``remember``."""
        self._reserve(len(new))
        start, stop = self._size, self._size + len(new)
        self._tokens[start:stop] = new
        self._size = stop
        tally_text(self._context, self._tokens, start, stop, self._orders, 0.0)
        if remember and self.memory is not None:
            tally_text(self.memory.text, self._tokens, start, stop, MEMORY_ORDERS, self.memory.FLOOR)


def _readable(top: TopK, rows: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """At most ``rows`` rows of ids and probabilities, in our types, without NaN."""
    ids = np.ascontiguousarray(top.token_ids[:rows, :TOP_K], np.int32)
    with np.errstate(over="ignore"):
        probs = np.exp(top.logprobs[: len(ids), :TOP_K].astype(np.float32))
    return ids, np.nan_to_num(probs, nan=0.0, posinf=0.0).clip(0.0, 1.0)


def warm_up() -> None:
    """Compile what a speculator runs, or fetch it from the disk: seconds the first time, a moment later on."""
    speculator = HybridSpeculator(memory=Memory(megabytes=1), vocabulary=Vocabulary(keys=1))
    top = TopK(np.zeros((1, TOP_K), np.int32), np.zeros((1, TOP_K), np.float32))
    speculator.begin([0, 0], top, 0)
    speculator.observe(speculator.propose(DraftRequest(1)).tree, [0], [0], top)
