"""The Memory section of the settings: one switch, what is remembered and what it is worth, files to hand over, and Wipe."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr

from specdec.speculators.memory import Remembered
from ui.gate import below_uploads
from ui.keeper import MemoryKeeper, count, rate
from ui.pump import apart
from ui.replies import Replies
from ui.visitors import is_owner

T = TypeVar("T")

SPAN = 10
"""How many replies, first and latest, the summary compares."""
BARS = 24
_PRIVACY = (
    "What is said in chats and in your files is kept as token ids and hashes, in one file on this machine. Nothing is sent "
    "anywhere. Whoever has that file could find out what was said. While this is off, nothing is looked up, learnt or saved."
)


class MemorySection:
    """Builds the section's components inside the surrounding block and wires them; they obey ``owner`` alone."""

    def __init__(self, keeper: MemoryKeeper, replies: Replies, tab: gr.Tab, owner: str | None = None) -> None:
        self._keeper = keeper
        self._owner = owner
        self._replies = replies
        switch = gr.Checkbox(keeper.on, label="Remember across chats", info=_PRIVACY, elem_id="memory-switch")
        summary = gr.HTML("", elem_id="memory-summary")
        with gr.Row(elem_id="memory-buttons"):
            files = gr.UploadButton("Add files …", file_count="multiple", size="sm", elem_id="memory-files")
            folder = gr.UploadButton("Add a folder …", file_count="directory", size="sm", elem_id="memory-folder")
            wipe = gr.Button("Wipe …", size="sm", elem_id="memory-wipe")
        with gr.Row(visible=False, elem_id="memory-confirm") as confirm:
            gr.HTML("Forget everything about chats with this model? This cannot be undone.")
            wipe_now = gr.Button("Wipe it", size="sm", variant="stop", elem_id="memory-wipe-now")
            keep = gr.Button("Keep it", size="sm", elem_id="memory-keep")
        line = gr.HTML("", elem_id="memory-line")

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        tab.select(self.show, outputs=[switch, summary], queue=False, **quiet)
        switch.input(apart(self.switch), switch, [summary, line], concurrency_limit=None, **quiet)
        for button in (files, folder):
            button.upload(apart(self.read), button, [summary, line], concurrency_limit=None, **quiet)
        wipe.click(lambda: gr.update(visible=True), outputs=confirm, queue=False, **quiet)
        gr.on([keep.click, wipe_now.click], lambda: gr.update(visible=False), outputs=confirm, queue=False, **quiet)
        wipe_now.click(apart(self.wipe), None, [summary, line], concurrency_limit=None, **quiet)

    def show(self) -> tuple[bool, str]:
        """How switch and summary stand."""
        self._check()
        return self._keeper.on, self.summary()

    def switch(self, on: bool) -> Generator[tuple[Any, str], None, None]:
        """Turn the memory on or off."""
        said = "On: from now on chats are remembered." if on else "Off. What was remembered before stays until you wipe it."
        yield from self._change(partial(self._keeper.switch, on), said)

    def wipe(self) -> Generator[tuple[Any, str], None, None]:
        """Forget everything."""
        yield from self._change(self._keeper.wipe, "Wiped: nothing is remembered, and the file is deleted.")

    def read(self, uploads: Sequence[str] | None) -> Generator[tuple[Any, str], None, None]:
        """Take in the files handed over, between the replies; the copies that came with the upload are deleted.

        It is the client that names the files: what was not uploaded is neither read nor deleted.
        """
        self._check()
        named = [(upload, below_uploads(upload)) for upload in uploads or []]
        files = [file for _, file in named if file is not None]
        tokens, refused = 0, [Path(upload).name for upload, file in named if file is None]
        try:
            for number, file in enumerate(files, start=1):
                yield gr.skip(), _line(f"Reading {number} of {count(len(files), 'file')} …")
                try:
                    tokens += self._take_turn(partial(self._keeper.read, file))
                except ValueError:
                    refused.append(file.name)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        yield self.summary(), _line(_taken_in(tokens, len(named) - len(refused), refused, self._keeper.on))

    def summary(self) -> str:
        """What is remembered, as HTML."""
        memory, path = self._keeper.memory, self._keeper.path
        size = _size(path) if path is not None and path.exists() else "nothing on disk"
        if memory is None:
            return f"<p>Off; {size}.{' ' + escape(self._keeper.why_off) if self._keeper.why_off else ''}</p>"
        known, replies = len(memory), count(len(memory.replies), "reply")
        parts = [
            f"<p><b>{known:,}</b> contexts known from {replies} and your files: {known / memory.capacity:.1%} of the memory's "
            f'limit; <span title="{escape(path.name if path else "")}">{size}</span>.</p>'
        ]
        if len(memory.replies) >= 2:
            parts.append(_progress(memory.replies))
        return "".join(parts)

    def _check(self) -> None:
        """Refuse whoever is not the owner."""
        if not is_owner(self._owner):
            raise gr.Error("The memory belongs to the owner of this page.", print_exception=False)

    def _change(self, change: Callable[[], None], done: str) -> Generator[tuple[Any, str], None, None]:
        """Change the memory between two replies; yields summary and line for the page."""
        self._check()
        if not self._replies.line.idle:
            yield gr.skip(), _line("Waiting for the reply to end …")
        try:
            self._take_turn(change)
        except OSError as error:
            done = f"That did not work: {error}."
        yield self.summary(), _line(done)

    def _take_turn(self, work: Callable[[], T]) -> T:
        return self._replies.take(work, lambda: False, lambda ahead: None)


def _size(file: Path) -> str:
    size = file.stat().st_size
    return f"{size / 1e6:,.1f} MB on disk" if size >= 1e6 else f"{size / 1e3:,.0f} kB on disk"


def _line(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _taken_in(tokens: int, files: int, refused: Sequence[str], on: bool) -> str:
    """What became of files that were handed over."""
    if not on:
        return "The memory is off: turn it on to add files."
    line = f"Took in {tokens:,} tokens from {count(files, 'file')}." if files else "Took in nothing."
    if not refused:
        return line
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    return f"{line} Left out, because not UTF-8 text: {', '.join(refused[:3])}{more}."


def _progress(replies: Sequence[Remembered]) -> str:
    """Tokens per pass from the first reply to the latest: a figure for each end, and a bar for each group of replies."""
    span = min(SPAN, len(replies) // 2)
    first, latest = replies[:span], replies[-span:]
    size = -(-len(replies) // BARS)
    rates = [rate(replies[i : i + size]) for i in range(0, len(replies), size)]
    highest = max(rates)
    bars = "".join(f'<rect x="{4 * i}" y="{28 * (1 - r / highest):.1f}" width="3" height="28"/>' for i, r in enumerate(rates))
    which = "reply" if span == 1 else f"{span} replies"
    return (
        f"<p>The first {which}: <b>{rate(first):.1f}</b> tokens per pass; the latest: <b>{rate(latest):.1f}</b>.</p>"
        f'<svg viewBox="0 0 {4 * BARS} 28" role="img" aria-label="tokens per pass, reply by reply">{bars}</svg>'
    )
