"""Relay: the frames of one reply over two Gradio events, so that while it streams only what changes is sent.

At every yield Gradio builds anew each component that an event names and leaves as it is. For the message box, the meter and the
shelf that would be a fifth of what a streamed step costs the server, and so the engine. A third event, `ChatHandlers.settle`,
tells how they stand afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from functools import wraps
from typing import Any

import gradio as gr

from ui.chat import NOTHING, Frame
from ui.chats import MAX_TABS
from ui.visitors import Shared

Answer = Callable[..., Generator[Frame, None, None]]
"""A handler whose first frame says that a reply begins; closing it ends the reply."""


UNSTREAMED = 30.0
"""Seconds after which a reply that was begun and never streamed is given up."""


class Relay:
    """Between the answering handlers and the page: ``begin(handler)``, then `stream`."""

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
