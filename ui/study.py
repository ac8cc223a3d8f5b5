"""Study while idle: the engine fills its table of the model's own vocabulary when nobody waits for a reply."""

from __future__ import annotations

import logging
import threading
import time

from specdec.serving.line import Line
from specdec.serving.service import ClosedError
from specdec.study import ROUNDS
from ui.replies import Replies
from ui.turns import ENDING

log = logging.getLogger(__name__)

QUIET = 5.0
"""Seconds without a reply after which the engine counts as idle."""
SLOWEST = 0.2
"""Seconds of a plain pass beyond which a study would take hours; such a model is left alone."""


def study_when_idle(replies: Replies) -> None:
    """Study whatever model ``replies`` has, in the background; a reply interrupts it, the next pause goes on."""
    threading.Thread(target=_study, args=(replies,), daemon=True, name="study").start()


def _study(replies: Replies) -> None:
    while True:
        _wait_for_quiet(replies.line)
        try:
            replies.service.call(lambda: _go_on(replies))
        except ClosedError:  # the program is ending
            return
        except Exception:
            log.exception("the study of the model's vocabulary failed; the chat works without it")
            return


def _wait_for_quiet(line: Line) -> None:
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET:
        time.sleep(0.5)
        if not line.idle:
            quiet_since = time.monotonic()


def _go_on(replies: Replies) -> None:
    engine, vocabulary = replies.engine, replies.engine.vocabulary
    complete = vocabulary.adjacent >= engine.target.vocab_size and vocabulary.rounds >= ROUNDS
    if engine.pass_cost.plain <= SLOWEST and not complete:
        engine.study(lambda what, share: replies.line.idle and not ENDING.is_set())
