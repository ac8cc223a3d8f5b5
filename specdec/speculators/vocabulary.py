"""What the target says about its own vocabulary: made once per model, of nothing but the model.

Two parts, both optional, both resumable: the *adjacency*, the target's next tokens after "newline + token" for every token
(Token Recycling's matrix, arXiv 2408.08696, filled ahead of time instead of as the chat goes); and *self-talk*, conversations
that the model writes all by itself, question and answer, from the bare chat template on (the idea of Magpie,
arXiv 2406.08464), of which the target's next tokens after the last one, two and three tokens are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.speculators import TopK
from specdec.speculators.candidates import ORDERS, VOCABULARY
from specdec.speculators.evidence import Evidence, blend_text, empty_evidence
from specdec.speculators.storage import load_arrays, pack, save_arrays, unpack

LOGIT_ORDERS = np.array(ORDERS[VOCABULARY], np.int64)
TOKEN_ORDER = np.array([1], np.int64)
Progress = Callable[[float], bool]  # called with the share done; False: stop here


class Writer(Protocol):
    """The target as it writes many texts at once, each with its own K/V."""

    def start(self, prompt: NDArray[np.int64], rows: int) -> TopK:
        """``rows`` new texts that all begin with ``prompt`` [T]; the target's view after it, [rows, K]."""
        ...

    def step(self, token_ids: NDArray[np.int64]) -> TopK:
        """Append one token to each text, [rows]; the target's view after it, [rows, K]."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The chat template, cut where a message goes: ``head`` + question + ``to_reply`` + answer + ``to_question`` + ..."""

    head: tuple[int, ...]
    to_reply: tuple[int, ...]
    to_question: tuple[int, ...]
    end_ids: frozenset[int]  # tokens that end a message


class Vocabulary:
    """One per model, shared by all its conversations. ``keys``: how many contexts it may hold (84 bytes each)."""

    def __init__(self, keys: int = 1 << 19) -> None:
        self.logits: Evidence = empty_evidence(keys)
        self.adjacent = 0  # tokens whose neighbours are known
        self.rounds = 0  # of self-talk

    def learn_adjacency(
        self,
        view: Callable[[NDArray[np.int64]], TopK],
        vocab_size: int,
        newline: int,
        progress: Progress,
        batch: int = 256,
    ) -> None:
        """``view`` gives the target's next tokens [B, K] after each row of [B, 2] token ids."""
        while self.adjacent < vocab_size and progress(self.adjacent / vocab_size):
            tokens = np.arange(self.adjacent, min(self.adjacent + batch, vocab_size))
            top = view(np.stack([np.full_like(tokens, newline), tokens], axis=1))
            ids, probs = _arrays(top)
            for row, token in enumerate(tokens):
                blend_text(self.logits, np.array([token]), 0, ids[row : row + 1], probs[row : row + 1], TOKEN_ORDER, 0.0)
            self.adjacent += len(tokens)

    def self_talk(
        self,
        writer: Writer,
        frame: ChatFrame,
        progress: Progress,
        rounds: int,
        rows: int = 64,
        length: int = 256,
    ) -> None:
        """Until ``rounds`` in all are done, let the target write ``rows`` texts of ``length`` tokens."""
        while self.rounds < rounds:
            rng = np.random.default_rng(self.rounds)
            talks = [_Talk(frame) for _ in range(rows)]
            texts = np.empty((rows, len(frame.head) + length), np.int64)
            texts[:, : len(frame.head)] = frame.head
            views: list[TopK] = [writer.start(np.array(frame.head, np.int64), rows)]
            for i in range(length):
                if not progress((self.rounds + i / length) / rounds):
                    return
                latest = views[-1]
                tokens = [talk.next(latest.token_ids[row], latest.logprobs[row], rng) for row, talk in enumerate(talks)]
                texts[:, len(frame.head) + i] = tokens
                if i < length - 1:
                    views.append(writer.step(np.array(tokens, np.int64)))
            for row in range(rows):
                view = TopK(np.stack([v.token_ids[row] for v in views]), np.stack([v.logprobs[row] for v in views]))
                self.study(texts[row], view, len(frame.head) - 1)
            self.rounds += 1

    def study(self, token_ids: NDArray[np.int64], top: TopK, start: int) -> None:
        """Keep the target's view ``top`` of a text, of the positions from ``start`` on."""
        blend_text(self.logits, token_ids, start, *_arrays(top), LOGIT_ORDERS, 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``, whole or not at all; shares as float16."""
        arrays = pack(self.logits, "logits")
        arrays["logits.shares"] = arrays["logits.shares"].astype(np.float16)
        save_arrays(path, {"done": np.array([self.adjacent, self.rounds]), **arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str], keys: int = 1 << 19) -> Vocabulary:
        """What `save` wrote; ValueError where it is no such file."""
        arrays = load_arrays(path)
        vocabulary = cls(keys)
        try:
            unpack(arrays, "logits", vocabulary.logits)
            vocabulary.adjacent, vocabulary.rounds = map(int, arrays["done"])
            if min(vocabulary.adjacent, vocabulary.rounds) < 0:
                raise ValueError("its progress is negative")
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} holds no vocabulary table ({error}); delete it to build it anew") from error
        return vocabulary


class _Talk:
    """One text of self-talk: the model asks (sampled) and answers (greedy) in turn."""

    QUESTION_LIMIT = 60
    REPLY_LIMIT = 200

    def __init__(self, frame: ChatFrame) -> None:
        self.frame = frame
        self.forced: list[int] = []
        self.asking = True
        self.spoken = 0

    def next(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], rng: np.random.Generator) -> int:
        """The next token, given the target's view [K]."""
        if self.forced:
            return self.forced.pop(0)
        token = int(ids[np.argmax(logprobs + rng.gumbel(size=len(ids)))] if self.asking else ids[0])
        self.spoken += 1
        if token not in self.frame.end_ids and self.spoken <= (self.QUESTION_LIMIT if self.asking else self.REPLY_LIMIT):
            return token
        self.forced = list(self.frame.to_reply if self.asking else self.frame.to_question)
        self.asking = not self.asking
        self.spoken = 0
        return self.forced.pop(0)


def _arrays(top: TopK) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.ascontiguousarray(top.token_ids, np.int32), np.exp(np.ascontiguousarray(top.logprobs, np.float32))
