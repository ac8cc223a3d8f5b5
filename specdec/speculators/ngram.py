"""NGramSpeculator: what the conversation's own text has shown so far, and nothing else."""

from __future__ import annotations

from specdec.speculators.evidence import LONGEST
from specdec.speculators.hybrid import ANY_ID, LEARNING_RATE, HybridSpeculator


class NGramSpeculator(HybridSpeculator):
    """Several continuations of the last 1 to ``n`` tokens, as found in prompt and reply, at most ``gamma`` tokens deep.

    Back-off, smoothing and interpolation of the orders are the mixer's: `HybridSpeculator` with every other source left out.
    """

    def __init__(
        self, n: int = LONGEST, gamma: int = 24, *, vocab_size: int = ANY_ID, learning_rate: float = LEARNING_RATE
    ) -> None:
        super().__init__(n=n, gamma=gamma, vocab_size=vocab_size, recycling=False, learning_rate=learning_rate)
