"""Turns: what is told of them, and how what was begun ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.devices import usable_cores

ENDING = threading.Event()
"""Set once the program ends: whatever is under way then ends at its next step."""


def leave_a_core() -> None:
    """Keep one core for the page and the browser, unless ``OMP_NUM_THREADS`` says otherwise; call it in the device's thread.

    The target's threads wait for the slowest of them, so on two busy cores one thread is faster than two.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(usable_cores() - 1, 1))


def in_line(ahead: int) -> str:
    """What to tell somebody who waits for a turn: ``ahead`` others come first, with a reply, a comparison, a model to load."""
    return f"waiting for {ahead} {'other' if ahead == 1 else 'others'} before this one"


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
