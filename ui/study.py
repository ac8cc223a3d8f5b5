"""Study while idle: the engine fills its table of the model's own vocabulary when nobody waits for a reply."""

from __future__ import annotations

import logging
import threading
import time

from specdec.engine import SpeculativeEngine
from specdec.study import ROUNDS
from ui.turns import ENGINE_THREAD, Turns

log = logging.getLogger(__name__)

QUIET = 5.0
"""Seconds without a reply after which the engine counts as idle."""
SLOWEST = 0.2
"""Seconds of a plain pass beyond which a study would take hours; such a model is left alone."""


def study_when_idle(engine: SpeculativeEngine, turns: Turns) -> None:
    """Study in the background until all is known; a reply interrupts it, the next pause goes on."""
    if engine.pass_cost.plain <= SLOWEST:
        threading.Thread(target=_study, args=(engine, turns), daemon=True, name="study").start()


def _study(engine: SpeculativeEngine, turns: Turns) -> None:
    vocabulary = engine.vocabulary
    try:
        while vocabulary.adjacent < engine.target.vocab_size or vocabulary.rounds < ROUNDS:
            quiet_since = time.monotonic()
            while time.monotonic() - quiet_since < QUIET:
                time.sleep(0.5)
                if not turns.idle:
                    quiet_since = time.monotonic()
            before = vocabulary.adjacent, vocabulary.rounds
            ENGINE_THREAD.submit(engine.study, lambda what, share: turns.idle).result()
            if turns.idle and before == (vocabulary.adjacent, vocabulary.rounds):
                return  # nothing more to learn: a model without a chat template writes no conversations
    except Exception:
        log.exception("the study of the model's vocabulary failed; the chat works without it")
