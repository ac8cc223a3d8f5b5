"""Turns: who may use the engine. One at a time, first come, first served, and everybody else knows their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GLANCE = 0.1  # seconds between two looks at whether somebody who waits has given up


class GaveUp(Exception):
    """Whoever waited for a turn was told to stop before it came."""


class Turns:
    """A fair queue in front of something that serves one at a time."""

    def __init__(self) -> None:
        self._line: list[object] = []
        self._moved = threading.Condition()

    @contextmanager
    def turn(self, cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> Iterator[None]:
        """Wait for one's turn and hold it.

        ``waiting`` hears how many are ahead, whenever that changes. Raises GaveUp once ``cancelled()``.
        """
        ticket = object()
        with self._moved:
            self._line.append(ticket)
        try:
            self._wait(ticket, cancelled, waiting)
            yield
        finally:
            with self._moved:
                self._line.remove(ticket)
                self._moved.notify_all()

    def _wait(self, ticket: object, cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> None:
        told = 0
        with self._moved:
            while ahead := self._line.index(ticket):
                if cancelled():
                    raise GaveUp
                if ahead != told:
                    told = ahead
                    waiting(ahead)
                self._moved.wait(_GLANCE)
