"""Relay: the frames of one reply over three Gradio events, so that while it streams only what changes is sent.

At every yield Gradio builds anew each component that an event names and leaves as it is. For the message box, the meter and the
shelf that would be a fifth of what a streamed step costs the server, and so the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import wraps
from typing import Any

import gradio as gr

from ui.chat import SKIP, Frame

Answer = Callable[..., Generator[Frame, None, None]]
"""A handler whose first frame says that a reply begins, and whose last one that it has ended."""


class Relay:
    """Between the answering handlers and the page: ``begin(handler)``, then `stream`, then `finish`."""

    def __init__(self) -> None:
        self._frames: dict[str | None, Generator[Frame, None, None]] = {}
        self._rest: dict[str | None, tuple[Any, Any, Any]] = {}

    def begin(self, answer: Answer) -> Callable[..., Frame]:
        """A handler that gives the first frame of ``answer`` and leaves the others to `stream`."""

        @wraps(answer)
        def first(*arguments: Any) -> Frame:
            frames = answer(*arguments)
            frame = next(frames, (SKIP, SKIP, SKIP, SKIP, SKIP))
            self._frames[next(one.session_hash for one in arguments if isinstance(one, gr.Request))] = frames
            return frame

        return first

    def stream(self, request: gr.Request) -> Iterator[tuple[Any, Any]]:
        """The values of (chatbot, panel), frame by frame."""
        with closing(self._frames.pop(request.session_hash, _none())) as frames:
            for rows, box, panel, meter, shelf in frames:
                if not box == meter == shelf == SKIP:
                    self._rest[request.session_hash] = box, meter, shelf
                yield rows, panel

    def finish(self, request: gr.Request) -> tuple[Any, Any, Any]:
        """The last values of (box, meter, shelf)."""
        return self._rest.pop(request.session_hash, (SKIP, SKIP, SKIP))

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or reloaded."""
        self._frames.pop(request.session_hash, None)
        self._rest.pop(request.session_hash, None)


def _none() -> Generator[Frame, None, None]:
    """No frames: nothing was asked."""
    yield from ()
