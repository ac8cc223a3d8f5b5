"""Stop signals: how what was begun ends, by its user, with the program, or when its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = threading.Event()
"""Set once the program ends: whatever is under way then ends at its next step."""


class Stops:
    """A stop signal for what each tab has begun, so that a tab ends its own work and no other's."""

    def __init__(self) -> None:
        self._signals: dict[str, threading.Event] = {}

    @contextmanager
    def begin(self, tab: str) -> Iterator[threading.Event]:
        """The signal of new work, which ends the tab's work before; it is set once the new one is left, however that ends."""
        self.stop(tab)
        signal = self._signals[tab] = threading.Event()
        try:
            yield signal
        finally:
            signal.set()
            if self._signals.get(tab) is signal:
                del self._signals[tab]

    def stop(self, tab: str) -> None:
        """End the tab's work, if there is any."""
        if signal := self._signals.pop(tab, None):
            signal.set()


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
