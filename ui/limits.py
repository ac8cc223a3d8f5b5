"""Limits: what one visitor may ask of a page that is open to everybody."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ui.settings import MAX_TOKENS, Settings
from ui.turns import ENDING

_CHARACTERS = 20  # per token; a longer message is refused before its tokens are counted


class LimitError(ValueError):
    """A limit of this page refuses a request; the message is one line for the visitor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one visitor may ask for.

    Of a reply: ``prompt_tokens`` read, ``reply_tokens`` written, ``seconds`` once its turn has come. ``pending``: replies,
    audits and comparisons begun at once. ``chat_characters``: of one chat with all its messages. ``body_bytes``: of one
    request. ``kept_seconds``: how long a chat that nobody uses is remembered.
    """

    prompt_tokens: int
    reply_tokens: int
    seconds: float
    pending: int = sys.maxsize
    chat_characters: int = sys.maxsize
    body_bytes: int = sys.maxsize
    kept_seconds: float = math.inf

    def settings(self, asked: Settings) -> Settings:
        """``asked`` within the limits."""
        return replace(asked, max_tokens=min(asked.max_tokens, self.reply_tokens))

    def characters(self, context: int) -> int:
        """How many characters can fit a prompt at all, for a model that reads ``context`` tokens."""
        return _CHARACTERS * min(self.prompt_tokens, context)

    def check(self, texts: Iterable[str], context: int) -> None:
        """Refuse texts of which one is far too long, before anything is done with them. Raises LimitError."""
        if any(len(text) > self.characters(context) for text in texts):
            raise LimitError(self.too_long(context))

    def too_long(self, context: int) -> str:
        """What to tell somebody whose message is too long."""
        if context < self.prompt_tokens:
            return f"this model reads at most {context:,} tokens at once: shorten the message"
        return f"this page reads at most {self.prompt_tokens:,} tokens at once: shorten the message"


PRIVATE = Limits(prompt_tokens=sys.maxsize, reply_tokens=MAX_TOKENS, seconds=math.inf)
"""One's own machine."""
PUBLIC = Limits(
    prompt_tokens=4096,
    reply_tokens=1024,
    seconds=60,
    pending=4,
    chat_characters=200_000,
    body_bytes=4 << 20,
    kept_seconds=24 * 3600,
)
"""A Space, or a page that is open to the network."""


class Clock:
    """Ends a reply: once ``stop`` is set or the program ends, or ``seconds`` after it was first asked; waiting is free."""

    def __init__(self, stop: threading.Event, seconds: float) -> None:
        self.late = False
        self._stop, self._seconds = stop, seconds
        self._end: float | None = None

    def ends(self) -> bool:
        """Whether the reply is to end; ``late`` then tells whether it is time that ends it."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        stopped = self._stop.is_set() or ENDING.is_set()
        self.late = self.late or (now >= self._end and not stopped)
        return self.late or stopped
