"""Line: who may write a reply now. Several at once, callers in rotation, and everybody knows their place."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass, field

GLANCE = 0.1
"""Seconds between two looks of somebody who waits at whether it was given up, and at how many are ahead."""


class GaveUp(Exception):
    """Whoever waited for a place was told to stop before it came."""


@dataclass(slots=True, eq=False)
class Place:
    """A place in the line. ``granted`` is done once it is one's turn, which lasts until `Line.leave`.

    ``round``: of the rotation in which it is served. ``alone``: nobody else may have a turn meanwhile.
    """

    round: int
    alone: bool
    granted: Future[None] = field(default_factory=Future)


class Line:
    """A fair queue in front of ``width`` replies at once.

    Who asks for several places has one in each round, so that others wait for one of them and not for all; within a round the
    first to come is the first served. Who wants to be ``alone`` waits until all others have left, and nobody overtakes.
    """

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._waiting: list[Place] = []
        self._running: list[Place] = []
        self._latest: dict[Hashable, int] = {}  # the last round of everybody who came since the line was empty
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Nobody has a turn or waits for one."""
        return not (self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def width(self) -> int:
        """How many may have a turn at once."""
        return self._width

    def widen(self, width: int) -> None:
        """Let ``width`` have a turn at once from now on."""
        with self._lock:
            self._width = width
            self._grant()

    def enter(self, caller: Hashable, *, alone: bool = False) -> Place:
        """A place for ``caller``, who is told apart from others by equality."""
        with self._lock:
            present = min((place.round for place in (*self._waiting, *self._running)), default=0)
            empty = not (self._waiting or self._running)
            self._latest = {} if empty else {other: last for other, last in self._latest.items() if last >= present}
            place = Place(max(present, self._latest.get(caller, -1) + 1), alone)
            self._latest[caller] = place.round
            insort(self._waiting, place, key=lambda other: other.round)
            self._grant()
            return place

    def leave(self, place: Place) -> None:
        """Give ``place`` up, before or after its turn."""
        with self._lock:
            (self._running if place in self._running else self._waiting).remove(place)
            self._grant()

    def ahead(self, place: Place) -> int:
        """How many others come first; 0 once it is granted."""
        with self._lock:
            if place not in self._waiting:
                return 0
            room = 1 if place.alone or any(other.alone for other in self._running) else self._width
            return self._waiting.index(place) + max(len(self._running) - room + 1, 0)

    @contextmanager
    def turn(
        self,
        caller: Hashable,
        cancelled: Callable[[], bool],
        waiting: Callable[[int], None],
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """Wait for one's turn and hold it.

        ``waiting`` hears how many are ahead, whenever that changes. Raises GaveUp once ``cancelled()``.
        """
        place, told = self.enter(caller, alone=alone), 0
        try:
            while not place.granted.done():
                if cancelled():
                    raise GaveUp
                ahead = self.ahead(place)
                if ahead and ahead != told:
                    told = ahead
                    waiting(ahead)
                try:
                    place.granted.result(GLANCE)
                except NotYet:
                    continue
            if cancelled():
                raise GaveUp
            yield
        finally:
            self.leave(place)

    def _grant(self) -> None:
        """Let those go on who are next and for whom there is room; the lock is held."""
        while self._waiting:
            first = self._waiting[0]
            full = len(self._running) >= (1 if first.alone else self._width)
            if full or any(place.alone for place in self._running):
                return
            self._running.append(self._waiting.pop(0))
            first.granted.set_result(None)
