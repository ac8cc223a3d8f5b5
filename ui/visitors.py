"""Visitors: who stands behind a request, what each may hold of what all share, and what each may ask of an open page."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from typing import Generic, TypeVar

from gradio.context import LocalContext

from ui.settings import MAX_TOKENS, Settings

V = TypeVar("V")


class TooManyError(ValueError):
    """A visitor has begun as much as one may have going; the message is one line for them."""


def visitor() -> str | None:
    """The address behind the present event, None where nobody asked. Of IPv6 the network: whoever has one has all of it.

    `specdec.serving.clients` has looked through the proxies already.
    """
    host: str | None = getattr(getattr(LocalContext.request.get(None), "client", None), "host", None)
    try:
        address = ip_address(host or "")
    except ValueError:
        return host
    return str(ip_network((str(address), 64), strict=False)) if address.version == 6 else host


def is_owner(owner: str | None) -> bool:
    """Whether the present event comes from who is logged in as ``owner``; without one, from whoever sits at this machine."""
    return owner is None or getattr(LocalContext.request.get(None), "username", None) == owner


class Pending:
    """How much work each visitor has begun and not yet got; at most ``most`` each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """The work of all visitors together."""
        return self._begun.total()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count as work of the present visitor while open. Raises TooManyError if that is one too many."""
        who = visitor()
        with self._lock:
            if self._begun[who] >= self._most:
                raise TooManyError(f"You already have {self._most} replies waiting: let one of them end, or stop it.")
            self._begun[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self._begun[who] -= 1
                if not self._begun[who]:
                    del self._begun[who]


class Shared(Generic[V]):
    """A table of bounded size under keys that clients choose.

    When it is full, the visitor who has most in it gives up what they used longest ago, if possible what is not ``needed``; so
    nobody pushes out what belongs to another by coming back under new keys. What nobody used for ``seconds`` goes, too.
    ``leave`` hears what goes. Not safe for threads by itself.
    """

    def __init__(
        self,
        most: int,
        seconds: float = math.inf,
        needed: Callable[[V], bool] = lambda value: False,
        leave: Callable[[str, V], None] = lambda key, value: None,
    ) -> None:
        self._most, self._seconds = most, seconds
        self._needed, self._leave = needed, leave
        self._held: OrderedDict[str, tuple[V, str | None, float]] = OrderedDict()  # with its visitor and when it was used

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def get(self, key: str) -> V | None:
        """The value under ``key``, if there is one."""
        return self._held[key][0] if key in self._held else None

    def values(self) -> list[V]:
        """All values, the one used last at the end."""
        return [value for value, _, _ in self._held.values()]

    def put(self, key: str, value: V) -> None:
        """Keep ``value`` as the one used last, for the present visitor; what there is no room for leaves."""
        self.expire()
        self._held[key] = value, visitor(), time.monotonic()
        self._held.move_to_end(key)
        while len(self._held) > self._most:
            self._evict(self._least_deserved(key))

    def expire(self) -> None:
        """Let go what nobody used for too long."""
        latest = time.monotonic() - self._seconds
        while self._held and self._held[oldest := next(iter(self._held))][2] < latest:
            self._evict(oldest)

    def pop(self, key: str) -> V | None:
        """Take out the value under ``key``, if there is one; ``leave`` does not hear of it."""
        return self._held.pop(key)[0] if key in self._held else None

    def _evict(self, key: str) -> None:
        self._leave(key, self._held.pop(key)[0])

    def _least_deserved(self, new: str) -> str:
        (greediest, _), *_ = Counter(who for _, who, _ in self._held.values()).most_common(1)
        theirs = [key for key, (_, who, _) in self._held.items() if who == greediest and key != new]
        return next((key for key in theirs if not self._needed(self._held[key][0])), (theirs or list(self._held))[0])


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
