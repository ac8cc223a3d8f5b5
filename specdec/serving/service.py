"""Service: one thread owns the device and runs the scheduler; everybody else talks to it through queues.

All work on the target happens in that thread, from loading it on: OpenMP keeps a pool of workers for every thread that ever
called it, and with more workers than cores they stop spinning between two operations, which takes a third of the speed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AnySequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from specdec.conversation import Conversation
from specdec.devices import free_bytes
from specdec.engine import SpeculativeEngine
from specdec.prompt import Message, Prompt
from specdec.scheduler import Scheduler
from specdec.sequence import Sequence
from specdec.serving.line import Line
from specdec.step import Step

T = TypeVar("T")
Messages = AnySequence[Message]
log = logging.getLogger(__name__)

Deliver = Callable[[Step | Exception | None], None]
"""Hears, in the device's thread, each step of a reply; then None where it has ended, or the error that ended it."""

WIDEST = 16
"""The most replies at once that are chosen by themselves."""
_GAIN = 1.15
"""How many times as many tokens a second twice as many replies must bring to be worth their memory."""
_SHARE = 0.5
"""Of the free memory, what the K/V of the replies that are written at once may take."""


class ClosedError(RuntimeError):
    """Nothing is computed here any more, or not yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A reply that is being written: its ``sequence`` in the ``scheduler`` that runs it, and who hears its steps."""

    sequence: Sequence
    scheduler: Scheduler
    deliver: Deliver


class Service:
    """Runs an engine in a thread of its own. ``engine`` may come later, and be exchanged, by `use`.

    Whoever wants a reply first takes a place in ``line``.
    """

    def __init__(self, engine: SpeculativeEngine | None = None) -> None:
        self.line = Line()
        self._engine: SpeculativeEngine | None = None
        self._told: list[Callable[[str], None]] = []
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._replies: list[Reply] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="device")
        self._thread.start()
        if engine is not None:
            self.use(engine)

    @property
    def engine(self) -> SpeculativeEngine:
        """The engine in use."""
        if self._engine is None:
            raise ClosedError("no model is loaded")
        return self._engine

    def use(self, engine: SpeculativeEngine) -> None:
        """Let later replies be written by ``engine``."""
        engine.target.progress = self._tell
        self._engine = engine

    @contextmanager
    def telling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """While open, ``tell`` hears what the engine prepares before it goes on, whoever needs it."""
        self._told.append(tell)
        try:
            yield
        finally:
            self._told.remove(tell)

    def call(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns or raises, done in the device's thread between two rounds. Raises ClosedError."""
        if threading.current_thread() is self._thread:
            return work()
        future: Future[T] = Future()
        self._inbox.put(lambda: _settle(future, work))
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                if future.done() or self._thread.is_alive():
                    continue
                raise ClosedError("the model's thread has ended") from None

    def later(self, work: Callable[[], object]) -> None:
        """Do ``work()`` in the device's thread between two rounds, without waiting for it; what it raises is logged."""

        def logged() -> None:
            try:
                work()
            except Exception:
                log.exception("what was to be done between two replies failed")

        self._inbox.put(logged)

    def begin(
        self, prompt: str | Messages | Prompt, deliver: Deliver, conversation: Conversation | None = None, **arguments: Any
    ) -> Reply:
        """Begin a reply as `SpeculativeEngine.stream` takes it, whose steps ``deliver`` hears; `end` ends it.

        Raises what `SpeculativeEngine.stream` raises before the first step, and ClosedError.
        """
        engine = self.engine
        request = engine.request(prompt, conversation, **arguments)

        def submit() -> Reply:
            sequence = engine.scheduler.submit(request, conversation or engine.conversation())
            self._replies.append(Reply(sequence, engine.scheduler, deliver))
            return self._replies[-1]

        return self.call(submit)

    def end(self, reply: Reply) -> None:
        """Nobody follows ``reply`` any more: it ends before the next round."""
        self._inbox.put(lambda: reply.scheduler.drop(reply.sequence))

    def stream(
        self, prompt: str | Messages | Prompt, conversation: Conversation | None = None, **arguments: Any
    ) -> Iterator[Step]:
        """As `SpeculativeEngine.stream`, in company of whatever else is written; its steps wait in a queue, and for nobody."""
        steps: SimpleQueue[Step | Exception | None] = SimpleQueue()
        reply = self.begin(prompt, steps.put, conversation, **arguments)
        try:
            while (item := steps.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.end(reply)

    def widest(self) -> int:
        """How many replies to write at once: as many as bring more tokens a second, and as there is memory for."""
        engine = self.engine
        cost, cache = engine.pass_cost, engine.target.new_cache()
        room = max(int(_SHARE * free_bytes(engine.target.device) / max(cache.size(cache.max_length), 1)), 1)
        width = 1
        while 2 * width <= min(WIDEST, room):
            gain = 2 * float(cost.seconds(width, width)) / float(cost.seconds(2 * width, 2 * width))
            if gain < _GAIN:
                break
            width *= 2
        return width

    def close(self) -> None:
        """End every reply before its next round, and the thread."""
        self._closed.set()
        self._inbox.put(lambda: None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most so many ``seconds``."""
        self._thread.join(seconds)

    def _tell(self, text: str, share: float | None) -> None:
        for tell in list(self._told):
            tell(text)

    def _run(self) -> None:
        while not self._closed.is_set():
            for scheduler in dict.fromkeys(reply.scheduler for reply in self._replies):
                self._round(scheduler)
            self._deliver()
            self._do_what_was_asked(wait=not self._replies)
        for reply in self._replies:
            reply.deliver(ClosedError("the app is ending"))

    @staticmethod
    def _round(scheduler: Scheduler) -> None:
        """One round. What fails as a whole ends every reply in it."""
        try:
            scheduler.step()
        except Exception as error:
            log.exception("a round of the scheduler failed")
            for sequence in list(scheduler.sequences):
                sequence.error = error
                scheduler.drop(sequence)

    def _do_what_was_asked(self, wait: bool) -> None:
        try:
            work = self._inbox.get(block=wait)
            while True:
                work()
                work = self._inbox.get_nowait()
        except Empty:
            return

    def _deliver(self) -> None:
        """Hand over every step that was made, and the end of what has ended."""
        for reply in list(self._replies):
            try:
                while reply.sequence.steps:
                    reply.deliver(reply.sequence.steps.popleft())
                if reply.sequence.ended:
                    self._replies.remove(reply)
                    reply.deliver(reply.sequence.error)
            except Exception:
                log.exception("nobody can hear a reply any more: it ends")
                reply.scheduler.drop(reply.sequence)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
