"""What tests of the API wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.serving.service import Service


def idle(service: Service) -> bool:
    """Whether nothing is being written."""
    return service.call(lambda: not service.engine.scheduler.sequences)


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until ``holds()``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
