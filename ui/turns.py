"""Turns: who may use the engine. One at a time, visitors in rotation, and everybody knows their place.

All work on the target happens in one thread, from loading it on: OpenMP keeps a pool of workers for every thread that ever
called it, and with more workers than cores they stop spinning between two operations, which takes a third of the speed.
"""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

import torch

from specdec.devices import usable_cores
from ui.visitors import visitor

T = TypeVar("T")

ENGINE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="engine")
ENDING = threading.Event()
"""Set once the program ends: whatever is under way then ends at its next step."""


def leave_a_core() -> None:
    """Keep one core for the page and the browser, unless ``OMP_NUM_THREADS`` says otherwise; call it in the engine's thread.

    The target's threads wait for the slowest of them, so on two busy cores one thread is faster than two.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(usable_cores() - 1, 1))


_GLANCE = 0.1  # seconds between two looks at whether somebody who waits has given up


def in_line(ahead: int) -> str:
    """What to tell somebody who waits for a turn: ``ahead`` others come first, with a reply, a comparison, a model to load."""
    return f"waiting for {ahead} {'other' if ahead == 1 else 'others'} before this one"


class GaveUp(Exception):
    """Whoever waited for a turn was told to stop before it came."""


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


@dataclass(slots=True, eq=False)
class _Ticket:
    """A place in the line: the round of the rotation in which it is served."""

    round: int


class Turns:
    """A fair queue in front of something that serves one at a time.

    Whoever asks for several turns has one in each round, so that others wait for one of them and not for all; within a round
    the first to come is the first served.
    """

    def __init__(self) -> None:
        self._line: list[_Ticket] = []
        self._latest: dict[object, int] = {}  # the last round of everybody who came since the line was empty
        self._moved = threading.Condition()

    @property
    def idle(self) -> bool:
        """Nobody has a turn or waits for one."""
        return not self._line

    def run(self, work: Callable[[], T], cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> T:
        """Wait for one's turn as in `turn`, then do ``work`` in the engine's thread and this context; what it returns."""
        with self.turn(cancelled, waiting):
            return ENGINE_THREAD.submit(copy_context().run, work).result()

    @contextmanager
    def turn(self, cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> Iterator[None]:
        """Wait for one's turn and hold it.

        ``waiting`` hears how many are ahead, whenever that changes. Raises GaveUp once ``cancelled()``.
        """
        holder = visitor() or object()
        with self._moved:
            present = self._line[0].round if self._line else 0
            self._latest = {other: last for other, last in self._latest.items() if self._line and last >= present}
            ticket = _Ticket(max(present, self._latest.get(holder, -1) + 1))
            self._latest[holder] = ticket.round
            insort(self._line, ticket, key=lambda other: other.round)
            self._moved.notify_all()
        try:
            self._wait(ticket, cancelled, waiting)
            yield
        finally:
            with self._moved:
                self._line.remove(ticket)
                self._moved.notify_all()

    def _wait(self, ticket: _Ticket, cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> None:
        told = 0
        with self._moved:
            while not (cancelled() or ENDING.is_set()):
                ahead = self._line.index(ticket)
                if not ahead:
                    return
                if ahead != told:
                    told = ahead
                    waiting(ahead)
                self._moved.wait(_GLANCE)
            raise GaveUp
