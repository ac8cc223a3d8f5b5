"""Choice: one text of an answer as its reader is told it. Steps go in, pieces come out, the stop string is left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine import SpeculativeEngine
from specdec.request import Request
from specdec.step import FinishReason, Step
from specdec.text import Detokenizer

_REASONS: dict[FinishReason, str] = {"length": "length", "context": "length"}
"""Why a text ended, in the API's words; every other reason is ``stop``."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its log-probability, the most probable ones in its place with theirs, and where its text begins."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next of a text. ``tokens``: those of ``text``, where their log-probabilities were asked for."""

    text: str
    tokens: Sequence[Token] = ()
    finish_reason: str | None = None


class Choice:
    """Folds the steps of a reply to ``request``. What may be the beginning of a stop string is held back until it is not."""

    def __init__(self, engine: SpeculativeEngine, request: Request) -> None:
        self._stop = request.stop_strings
        self._text = ""
        self._told = 0
        self._tokens = None if request.logprobs is None else _Tokens(engine, request)

    def add(self, step: Step) -> Piece:
        """What can be told after ``step``."""
        self._text += step.text
        reason = step.finish_reason
        start, self._told = self._told, len(self._text) - self._hidden(reason)
        finish = None if reason is None else _REASONS.get(reason, "stop")
        tokens: Sequence[Token] = ()
        if self._tokens is not None:
            self._tokens.add(step)
            tokens = self._tokens.take(None if reason not in (None, "stop_string") else self._told)
        return Piece(self._text[start : self._told], tokens, finish)

    def _hidden(self, reason: FinishReason | None) -> int:
        """How many of the last characters are, or may become, a stop string."""
        if reason == "stop_string":
            return max(len(stop) for stop in self._stop if self._text.endswith(stop))
        if reason is not None:
            return 0
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        return max((len(beginning) for beginning in beginnings if self._text.endswith(beginning)), default=0)


@dataclass(slots=True)
class _Tokens:
    """The tokens of a text that are not told yet."""

    engine: SpeculativeEngine
    request: Request
    waiting: deque[Token] = field(default_factory=deque)
    length: int = 0
    detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.detokenizer = Detokenizer(self.engine.tokenizer, self.request.prompt.token_ids)

    def add(self, step: Step) -> None:
        """The emitted tokens of ``step``, but for the one that ends the text by saying so."""
        assert step.logprobs is not None
        names = self.engine.token_texts
        said = step.token_ids[:-1] if step.finish_reason == "eos" else step.token_ids
        for token_id, own, ids, best in zip(said, *_columns(step), strict=False):
            top = tuple(zip(names(ids), best, strict=True))
            self.waiting.append(Token(names([token_id])[0], own, top, self.length))
            self.length += len(self.detokenizer.add(token_id))

    def take(self, before: int | None) -> list[Token]:
        """Those whose text begins ``before`` so many characters; None: all."""
        taken = []
        while self.waiting and (before is None or self.waiting[0].offset < before):
            taken.append(self.waiting.popleft())
        return taken


def _columns(step: Step) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """A step's log-probabilities as plain numbers."""
    assert step.logprobs is not None
    return step.logprobs.own.tolist(), step.logprobs.token_ids.tolist(), step.logprobs.best.tolist()
