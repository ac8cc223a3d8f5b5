"""From the engine's thread to the page: what a producer puts, in batches, and the frames of a reply over two Gradio events.

The engine puts what it makes into a queue and never waits; the page takes all that is there, a limited number of times a
second. So the page cannot pace the engine, however slow the browser is. What waits is bounded by the length of one reply.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import gradio as gr

from ui.state import MAX_TABS
from ui.visitors import Shared

T = TypeVar("T")

SKIP = gr.skip()
"""Leaves a component as it is."""
Frame = tuple[Any, Any, Any, Any, Any]
"""Values of the components (chatbot, box, panel, meter, saved)."""
NOTHING: Frame = (SKIP, SKIP, SKIP, SKIP, SKIP)
"""A frame that changes nothing."""

INTERVAL = 0.08
"""Seconds between two batches: at most a dozen page updates a second, each with all steps since the last."""
PULSE = 0.25
"""Seconds after which an empty batch is handed out, so that whoever takes the batches can notice that nobody listens."""

STILL: Any = object()
"""What a handler yields when it has nothing new, so that whoever runs it can notice that nobody listens."""
UNHEARD = 10.0
"""Seconds without anybody who listens after which a handler ends."""

_END: Any = object()


def in_own_thread(
    handler: Callable[..., Generator[T, None, None]], listening: Callable[[], bool] = lambda: True
) -> Callable[..., AsyncIterator[T]]:
    """``handler`` as one that takes none of the few threads that all of Gradio's handlers share, however long it waits.

    Each run has a thread of its own. It is closed once nobody is ``listening()`` to what it yields; `STILL` is not passed on.
    """

    @wraps(handler)
    async def run(*arguments: Any, **named: Any) -> AsyncIterator[T]:
        thread = ThreadPoolExecutor(1, thread_name_prefix="handler")
        items = handler(*arguments, **named)
        heard = time.monotonic()
        try:
            while True:
                step = partial(next, items, _END)
                item = await asyncio.wrap_future(thread.submit(copy_context().run, step))
                heard = time.monotonic() if listening() else heard
                if item is _END or time.monotonic() - heard > UNHEARD:
                    return
                if item is not STILL:
                    yield item
        finally:
            thread.submit(items.close)  # behind the step that is under way
            thread.shutdown(wait=False)

    return run


class Producer(Generic[T]):
    """Runs ``produce(put)`` in a thread of its own and the caller's context, and hands out what it puts, in batches.

    An exception in ``produce`` is raised again from `batches`, after everything put before it.
    """

    def __init__(self, produce: Callable[[Callable[[T], None]], None]) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=copy_context().run, args=(self._run, produce), daemon=True, name="producer")
        self._thread.start()

    def batches(self, interval: float = INTERVAL) -> Iterator[list[T]]:
        """Everything put since the last batch, until the producer is done; ``interval`` seconds apart, or more."""
        while True:
            taken = time.monotonic()
            batch, ended = self._take()
            if batch or not ended:
                yield batch
            if ended:
                break
            time.sleep(max(interval - (time.monotonic() - taken), 0))
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until the producer is done."""
        self._thread.join()

    def _run(self, produce: Callable[[Callable[[T], None]], None]) -> None:
        try:
            produce(self._items.put)
        except Exception as error:
            self._error = error
        finally:
            self._items.put(_END)

    def _take(self) -> tuple[list[T], bool]:
        batch: list[T] = []
        try:
            item = self._items.get(timeout=PULSE)
            while item is not _END:
                batch.append(item)
                item = self._items.get_nowait()
        except Empty:
            return batch, False
        return batch, True


Answer = Callable[..., Generator[Frame, None, None]]
"""A handler whose first frame says that a reply begins; closing it ends the reply."""
UNSTREAMED = 30.0
"""Seconds after which a reply that was begun and never streamed is given up."""


class ReplyStreams:
    """The frames of a reply over two Gradio events, ``begin(handler)``, then `stream`, which sends only what changes.

    At every yield Gradio builds anew each component that an event names and leaves as it is. For the message box, the meter and
    the saved chats that would be a fifth of what a streamed step costs the server, and so the engine. A third event,
    `ChatHandlers.settle`, tells how they stand afterwards.
    """

    def __init__(self) -> None:
        self._frames: Shared[Generator[Frame, None, None]] = Shared(
            MAX_TABS, UNSTREAMED, leave=lambda _, frames: frames.close()
        )
        self._lock = threading.Lock()

    def begin(self, answer: Answer) -> Callable[..., Frame]:
        """A handler that gives the first frame of ``answer`` and leaves the others to `stream`."""

        @wraps(answer)
        def first(*arguments: Any) -> Frame:
            with self._lock:
                self._frames.expire()
            frames = answer(*arguments)
            frame = next(frames, None)
            if frame is not None:
                tab = next(one.session_hash for one in arguments if isinstance(one, gr.Request))
                self._take(tab).close()
                with self._lock:
                    self._frames.put(tab or "", frames)
            return frame or NOTHING

        return first

    def stream(self, request: gr.Request) -> Generator[tuple[Any, Any], None, None]:
        """The values of (chatbot, panel), frame by frame."""
        with closing(self._take(request.session_hash)) as frames:
            for rows, _, panel, *_ in frames:
                yield rows, panel
            yield NOTHING[:2]  # Gradio repeats the last values at the end, when the tab may show another chat

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or reloaded."""
        self._take(request.session_hash).close()

    def _take(self, tab: str | None) -> Generator[Frame, None, None]:
        """The reply that was begun in the tab and is not streamed yet; no frames if there is none."""
        with self._lock:
            return self._frames.pop(tab or "") or _none()


def _none() -> Generator[Frame, None, None]:
    """No frames: nothing was asked."""
    yield from ()
