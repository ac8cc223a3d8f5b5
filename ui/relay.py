"""Relay: the frames of one reply over two Gradio events, so that while it streams only what changes is sent.

At every yield Gradio builds anew each component that an event names and leaves as it is. For the message box, the meter and the
shelf that would be a fifth of what a streamed step costs the server, and so the engine. A third event, `ChatHandlers.settle`,
tells how they stand afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import wraps
from typing import Any

import gradio as gr

from ui.chat import NOTHING, Frame

Answer = Callable[..., Generator[Frame, None, None]]
"""A handler whose first frame says that a reply begins; closing it ends the reply."""


class Relay:
    """Between the answering handlers and the page: ``begin(handler)``, then `stream`."""

    def __init__(self) -> None:
        self._frames: dict[str | None, Generator[Frame, None, None]] = {}

    def begin(self, answer: Answer) -> Callable[..., Frame]:
        """A handler that gives the first frame of ``answer`` and leaves the others to `stream`."""

        @wraps(answer)
        def first(*arguments: Any) -> Frame:
            frames = answer(*arguments)
            frame = next(frames, None)
            if frame is not None:
                tab = next(one.session_hash for one in arguments if isinstance(one, gr.Request))
                self._drop(tab)
                self._frames[tab] = frames
            return frame or NOTHING

        return first

    def stream(self, request: gr.Request) -> Iterator[tuple[Any, Any]]:
        """The values of (chatbot, panel), frame by frame."""
        with closing(self._frames.pop(request.session_hash, _none())) as frames:
            for rows, _, panel, *_ in frames:
                yield rows, panel
            yield NOTHING[:2]  # Gradio repeats the last values at the end, when the tab may show another chat

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or reloaded."""
        self._drop(request.session_hash)

    def _drop(self, tab: str | None) -> None:
        """End a reply that was begun and never streamed."""
        self._frames.pop(tab, _none()).close()


def _none() -> Generator[Frame, None, None]:
    """No frames: nothing was asked."""
    yield from ()
