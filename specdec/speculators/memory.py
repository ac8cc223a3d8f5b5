"""What outlives a conversation: n-grams and logits of earlier chats with one model, and what the mixer has learned.

A memory holds token ids and hashes, never text, but it can reveal what was said: it stays on this machine, in the one file that
its owner names, and `wipe` empties it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.speculators.candidates import MEMORY_TEXT, ORDERS
from specdec.speculators.evidence import Evidence, empty_evidence, tally_text
from specdec.speculators.mixer import WEIGHTS_SHAPE, prior_weights
from specdec.speculators.storage import load_arrays, pack, save_arrays, unpack


class Remembered(NamedTuple):
    """What one reply took: its ``tokens`` and target ``passes``; ``chat`` tells the chats apart."""

    chat: int
    tokens: int
    passes: int


class Memory:
    """Shared by all conversations with one model; give each `HybridSpeculator` the same one.

    ``text``: n-grams of prompts, replies and texts handed over; ``logits``: the target's next tokens after the same contexts;
    ``weights``: the mixer's; ``replies``: the figures of the latest replies, oldest first, for whoever wants to see the memory
    grow useful. Its size is fixed by ``megabytes``: when full, what was not met for longest goes.
    """

    FLOOR = 0.1  # the newest evidence weighs at least this much
    REPLIES = 1000

    def __init__(self, megabytes: int = 64) -> None:
        entry = sum(array[0].nbytes for array in empty_evidence(1)[:-1])
        fitting = (megabytes << 20) // (2 * entry)
        if fitting < 2:
            raise ValueError(f"a memory needs at least 1 megabyte, not {megabytes}")
        self._keys = 1 << (fitting.bit_length() - 1)
        self.wipe()

    def wipe(self) -> None:
        """Forget everything, the mixer's lessons included."""
        self.text: Evidence = empty_evidence(self._keys)
        self.logits: Evidence = empty_evidence(self._keys)
        self.weights = prior_weights()
        self.replies: list[Remembered] = []

    def note(self, reply: Remembered) -> None:
        """Keep the figures of a reply."""
        self.replies = [*self.replies[1 - self.REPLIES :], reply]

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in a text handed over by the user."""
        tokens = np.asarray(token_ids, np.int64)
        tally_text(self.text, tokens, 0, len(tokens), np.array(ORDERS[MEMORY_TEXT], np.int64), self.FLOOR)

    def __len__(self) -> int:
        """How many contexts it knows."""
        return int(np.count_nonzero(self.text.keys) + np.count_nonzero(self.logits.keys))

    @property
    def capacity(self) -> int:
        """How many contexts it has room for."""
        return len(self.text.keys) + len(self.logits.keys)

    @property
    def clock(self) -> int:
        """Advances with everything it takes in."""
        return int(self.text.clock[0] + self.logits.clock[0])

    @property
    def nbytes(self) -> int:
        """Its size in the machine's memory."""
        return sum(array.nbytes for evidence in (self.text, self.logits) for array in evidence)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``; a reader sees the old file or the new one, never half of one."""
        replies = np.array(self.replies, np.int64).reshape(-1, len(Remembered._fields))
        tables = {**pack(self.text, "text"), **pack(self.logits, "logits")}
        save_arrays(path, {"weights": self.weights, "replies": replies, **tables}, compress=False)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take in what `save` wrote, by a memory of this size or another; ValueError where it is no such file."""
        arrays = load_arrays(path)
        self.wipe()
        try:
            unpack(arrays, "text", self.text)
            unpack(arrays, "logits", self.logits)
            weights, replies = arrays["weights"].astype(np.float32), arrays["replies"]
            if replies.dtype.kind not in "iu" or replies.shape != (len(replies), len(Remembered._fields)):
                raise ValueError("the figures of its replies are none")
        except (KeyError, ValueError, TypeError) as error:
            self.wipe()
            raise ValueError(f"{path} holds no speculator memory ({error})") from error
        self.replies = [reply for row in replies.tolist() if (reply := Remembered(*row)).passes > 0 and reply.tokens >= 0]
        if weights.shape == WEIGHTS_SHAPE and np.isfinite(weights).all():
            self.weights = weights
