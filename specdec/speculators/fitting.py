"""How the mixer's prior is made: gradient descent on recorded verdicts.

`lessons` replays recorded replies and notes, for every token that the target emitted, what each source had to say; `fit`
minimises the mixer's log-loss on them (Adam, arXiv 1412.6980). The gradient is the one that `learn` follows online. `prior`
is the recipe by which the shipped ``prior.npy`` was made, from one model's replies to 240 questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.speculators.candidates import Opinions, candidate_of, empty_opinions, gather
from specdec.speculators.evidence import LONGEST
from specdec.speculators.growth import suffix_at
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.memory import Memory
from specdec.speculators.mixer import HIDDEN, NONE_READ, READ, WEIGHTS_SHAPE, empty_workspace, learn, mix
from specdec.speculators.replay import Trace, replay
from specdec.speculators.vocabulary import Vocabulary

SMALL_STEP = 1e-3  # a step this small measures the gradient
BUDGET = 32  # nodes per pass while lessons are noted


class Lesson(NamedTuple):
    """What was known at one node, ``depth`` below the root, and the number of the candidate that was right."""

    opinions: Opinions
    depth: int
    truth: int


class _Listener(HybridSpeculator):
    """Notes a lesson where the speculator would learn from it."""

    def __init__(self, like: HybridSpeculator, notes: list[Lesson]) -> None:
        super().__init__(
            n=like.n,
            gamma=like.gamma,
            vocab_size=like.vocab_size,
            memory=like.memory,
            vocabulary=like.vocabulary,
            recycling=like.top_k > 0,
        )
        self._notes = notes
        self._opinions = empty_opinions()

    def _learn(self, size: int, added: int) -> None:
        suffix = np.empty(LONGEST, np.int64)
        for depth in range(added):
            known = size + depth
            length = suffix_at(self._tokens, known, 0, self._tokens, self._tokens, suffix)
            gather(self._opinions, self._sources(), suffix, length, depth + 1)
            candidates, count = (int(number) for number in self._opinions.size)
            if candidates:
                truth = candidate_of(self._opinions, int(self._tokens[known]))
                self._notes.append(Lesson(_copy(self._opinions, count), depth + 1, truth if truth >= 0 else candidates))


def lessons(traces: Iterable[Trace], budget: int, speculator: Callable[[], HybridSpeculator]) -> list[Lesson]:
    """The lessons in ``traces``; ``speculator`` makes one for each conversation, with the sources it is to have."""
    notes: list[Lesson] = []
    conversation, listener = None, None
    for trace in traces:
        if listener is None or trace.conversation != conversation:
            conversation, listener = trace.conversation, _Listener(speculator(), notes)
        replay(trace, listener, budget)
    return notes


def prior(
    traces: Sequence[Trace],
    vocab_size: int,
    vocabulary: Vocabulary | None,
    progress: Callable[[str, float], object] = lambda what, share: None,
) -> NDArray[np.float32]:
    """Weights [ROWS, HIDDEN] fitted to ``traces`` replayed under every combination of sources that a user may have.

    With an empty memory and one carried along, each with the ``vocabulary`` (where given) and without; and with the context
    alone. ``progress(what, share done)`` is called now and then.
    """
    notes: list[Lesson] = []
    settings = [(carried, known, True) for known in dict.fromkeys((vocabulary, None)) for carried in (False, True)]
    settings.append((False, None, False))
    for index, (carried, known, recycling) in enumerate(settings):
        progress("replaying", index / len(settings))
        memory = Memory() if carried else None

        def speculator(
            memory: Memory | None = memory, known: Vocabulary | None = known, recycling: bool = recycling
        ) -> HybridSpeculator:
            return HybridSpeculator(vocab_size=vocab_size, memory=memory, vocabulary=known, recycling=recycling)

        notes += lessons(traces, BUDGET, speculator)
    return fit(notes, random_weights(np.random.default_rng(0)), progress=lambda share: progress("fitting", share))


def random_weights(rng: np.random.Generator) -> NDArray[np.float32]:
    """Where `fit` may start: small weights, and read-outs large enough for a gradient."""
    weights = rng.normal(0, 0.07, WEIGHTS_SHAPE)
    weights[READ] = rng.choice([-0.35, 0.35, 0.35, 0.35], HIDDEN)
    weights[NONE_READ] = 0.2
    return weights.astype(np.float32)


def fit(
    notes: Sequence[Lesson],
    weights: NDArray[np.float32],
    epochs: int = 6,
    rate: float = 0.003,
    batch: int = 64,
    seed: int = 0,
    progress: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float32]:
    """Weights that explain ``notes`` better than ``weights``; the rate falls linearly to 0."""
    rng = np.random.default_rng(seed)
    weights, work = weights.copy(), empty_workspace()
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    steps = epochs * -(-len(notes) // batch)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(len(notes))
        for start in range(0, len(order), batch):
            progress(step / steps)
            chosen = order[start : start + batch]
            moved = weights.copy()
            for note in (notes[i] for i in chosen):
                mix(weights, note.opinions, note.depth, work)
                learn(moved, note.opinions, note.depth, work, note.truth, SMALL_STEP)
            gradient = (weights - moved) / (SMALL_STEP * len(chosen))
            step += 1
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            direction = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
            weights -= np.float32(rate * (1 - step / steps)) * direction
    return weights


def _copy(opinions: Opinions, count: int) -> Opinions:
    """What `mix` and `learn` read of one node."""
    return opinions._replace(
        size=opinions.size.copy(),
        candidate=opinions.candidate[:count].copy(),
        expert=opinions.expert[:count].copy(),
        log_share=opinions.log_share[:count].copy(),
        recent=opinions.recent[:count].copy(),
        seen=opinions.seen.copy(),
        top=opinions.top.copy(),
    )
