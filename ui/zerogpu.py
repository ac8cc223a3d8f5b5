"""Decoding on ZeroGPU, where a GPU is there only in a forked child, for as long as one call of a `GPU` function takes.

So what goes in and comes out is pickled, nothing that the child makes is left afterwards (each reply reads its prompt anew),
and the child hears of Stop only when it yields: it yields every step, and while it reads.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from typing import Any

import gradio as gr

from specdec.audit import Audit, audit
from specdec.conversation import Conversation
from specdec.cost import PassCost
from specdec.embedded import Progress
from specdec.engine import SpeculativeEngine
from specdec.loading import CUDA_DEFAULT
from specdec.prompt import Prompt
from specdec.serving.line import GaveUp
from specdec.serving.service import Service
from specdec.step import Step
from ui.decoder import Decoder
from ui.environment import GPU
from ui.errors import explain
from ui.settings import Settings
from ui.stream import Producer
from ui.visitors import PUBLIC

_ARRIVAL = 6.0  # seconds: weights come to the GPU, a tree is checked, the pass cost is measured
_READING = 1 / 2000  # seconds per token of the prompt, generously
_PASS = 0.04  # seconds of a plain pass, until it is measured; a reply never takes more than one pass per token

Put = Callable[[Any], None]


def load(model: str | None, dtype: str, report: Progress) -> SpeculativeEngine:
    """The engine, its weights promised to the GPU; call it on the main thread, before the page is launched.

    It is checked on the CPU: only a child may compute on the GPU. Raises as `SpeculativeEngine`.
    """
    dtype = "bfloat16" if dtype == "auto" else dtype
    engine = SpeculativeEngine(model or CUDA_DEFAULT, device="cpu", dtype=dtype, progress=report)
    engine.model.to("cuda")
    return engine


def reply_seconds(prompt: Prompt, settings: Settings, details: bool, cost: PassCost | None) -> int:
    """Seconds to ask a GPU for: as many as the reply takes if no draft comes true. Less asked is sooner got."""
    plain = _PASS if cost is None else 1.5 * cost.plain
    return math.ceil(_ARRIVAL + min(len(prompt.token_ids) * _READING + settings.max_tokens * plain, PUBLIC.seconds))


def audit_seconds(prompt: Prompt, token_ids: tuple[int, ...], settings: Settings) -> int:
    """Seconds to ask a GPU for: all is read, and each token of the reply is chosen again."""
    return math.ceil(_ARRIVAL + (len(prompt.token_ids) + 10 * len(token_ids)) * _READING)


class LentDecoder(Decoder):
    """Decodes in children that have a GPU; make it before the page is launched, for they are forked from what is there then."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._cost: PassCost | None = None
        self._process = os.getpid()
        self._lent_steps = GPU(duration=reply_seconds)(self._steps_there)
        self._lent_audit = GPU(duration=audit_seconds)(self._audit_there)

    def parallel(self) -> int:
        """One: each reply has a GPU of its own, which is lent for that one."""
        return 1

    def conversation(self, *, remember: bool = True) -> Conversation | None:
        """None: its K/V would be gone with the child."""
        return None

    def steps(
        self,
        conversation: Conversation | None,
        prompt: Prompt,
        settings: Settings,
        cancelled: Callable[[], bool],
        details: bool,
        owner: Hashable = None,
    ) -> Iterator[Step]:
        """As `Decoder.steps`, but it leaves nothing to start from. A quota used up, or a child that died, is a gr.Error."""
        with closing(self._lent_steps(prompt, settings, details, self._cost)) as items:
            for item in items:
                if isinstance(item, PassCost):
                    self._cost = item
                if isinstance(item, Step):
                    yield item
                if cancelled():
                    return

    def audit(self, prompt: Prompt, token_ids: tuple[int, ...], settings: Settings, cancelled: Callable[[], bool]) -> Audit:
        """As `Decoder.audit`, but nothing of it once ``cancelled()``: raises GaveUp."""
        report: Audit | None = None
        with closing(self._lent_audit(prompt, token_ids, settings)) as items:
            for item in items:
                if item is not None:
                    report = item
                if cancelled():
                    break
        if report is None:
            raise GaveUp
        return report

    def _steps_there(
        self, prompt: Prompt, settings: Settings, details: bool, cost: PassCost | None
    ) -> Iterator[PassCost | Step | None]:
        def produce(put: Put, cancelled: Callable[[], bool]) -> None:
            self._arrive(cost)
            if cost is None:
                put(self.engine.pass_cost)
            for step in self.engine.stream(prompt, cancelled=cancelled, details=details, **settings.arguments()):
                put(step)

        yield from _yielding(produce)

    def _audit_there(self, prompt: Prompt, token_ids: tuple[int, ...], settings: Settings) -> Iterator[Audit | None]:
        def produce(put: Put, cancelled: Callable[[], bool]) -> None:
            self._arrive(None)
            put(audit(self.engine, prompt, token_ids, cancelled, **settings.arguments()))

        yield from _yielding(produce)

    def _arrive(self, cost: PassCost | None) -> None:
        """The weights are on the GPU now: once in each child, see the model afresh, with what passes ``cost`` if known."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.engine.move_in(cost)


def _yielding(produce: Callable[[Put, Callable[[], bool]], None]) -> Iterator[Any]:
    """What ``produce(put, cancelled)`` puts, in a thread of its own, and None whenever there was nothing for a while.

    Once closed, ``cancelled()`` is true, and nothing of it runs any more.
    """
    stop = threading.Event()
    pump: Producer[Any] = Producer(lambda put: produce(put, stop.is_set))
    try:
        for batch in pump.batches():
            yield from batch or [None]
    except Exception as error:  # as text: of any other exception only the name would come through
        raise gr.Error(explain(error), print_exception=False) from error
    finally:
        stop.set()
        pump.join()
