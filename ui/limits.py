"""Limits: what one visitor may ask of a page that is open to everybody."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ui.settings import MAX_TOKENS, Settings

_CHARACTERS = 20  # per token; a longer message is refused before its tokens are counted


class LimitError(ValueError):
    """A limit of this page refuses a request; the message is one line for the visitor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a reply may cost: ``prompt_tokens`` read, ``reply_tokens`` written, ``seconds`` once its turn has come."""

    prompt_tokens: int
    reply_tokens: int
    seconds: float

    def settings(self, asked: Settings) -> Settings:
        """``asked`` within the limits."""
        return replace(asked, max_tokens=min(asked.max_tokens, self.reply_tokens))

    def check(self, *messages: Mapping[str, str]) -> None:
        """Refuse a message that is far too long. Raises LimitError."""
        if any(len(message["content"]) > _CHARACTERS * self.prompt_tokens for message in messages):
            raise LimitError(self.too_long())

    def too_long(self) -> str:
        """What to tell somebody whose message is too long."""
        return f"this page reads at most {self.prompt_tokens:,} tokens at once: shorten the message"


PRIVATE = Limits(prompt_tokens=sys.maxsize, reply_tokens=MAX_TOKENS, seconds=math.inf)
"""One's own machine."""
PUBLIC = Limits(prompt_tokens=4096, reply_tokens=1024, seconds=60)
"""A Space, or a host that is open to the network."""


class Clock:
    """Ends a reply: once ``stop`` is set, or ``seconds`` after it was first asked, so that waiting for one's turn is free."""

    def __init__(self, stop: threading.Event, seconds: float) -> None:
        self.late = False
        self._stop, self._seconds = stop, seconds
        self._end: float | None = None

    def ends(self) -> bool:
        """Whether the reply is to end; ``late`` then tells whether it is time that ends it."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        self.late = self.late or (now >= self._end and not self._stop.is_set())
        return self.late or self._stop.is_set()
