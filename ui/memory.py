"""The memory across chats: loading, saving and wiping it, and its section in the settings.

All this happens in the engine's thread, between two replies. The memory is one file for each model; a switch that was turned
off stays off at the next start.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
from filelock import FileLock, Timeout

from specdec.folders import cache_folder, model_file
from specdec.serving.service import ClosedError
from specdec.speculators.memory import Memory, Remembered
from specdec.speculators.storage import set_aside
from specdec.stats import Stats
from ui.middleware import below_uploads
from ui.replies import Replies
from ui.settings import Settings
from ui.state import Chat, Tabs
from ui.stream import in_own_thread
from ui.visitors import is_owner

log = logging.getLogger(__name__)

GLANCE = 2.0
"""Seconds between two looks at whether there is something to save and nobody who would wait for it."""


class MemoryStore:
    """Keeps the memory of whatever engine ``replies`` has. Nothing is read before `open`."""

    def __init__(self, replies: Replies, tabs: Tabs) -> None:
        self.path: Path | None = None
        """The file of the present model's memory, once `open` was called."""
        self.why_off = ""
        """Why it is off although it was switched on, in a sentence."""
        self._replies = replies
        self._tabs = tabs
        self._saved = 0
        self._lock: FileLock | None = None  # held as long as the memory is in use: two apps do not undo each other's changes
        self._figures = threading.Lock()  # they are noted outside the device's thread

    @property
    def memory(self) -> Memory | None:
        """The memory in use; None while it is off."""
        return self._replies.engine.memory

    @property
    def on(self) -> bool:
        """Whether it is switched on, and in use once it was opened."""
        return not self._off.exists() and (self.path is None or self.memory is not None)

    @property
    def _off(self) -> Path:
        return cache_folder() / "memory" / "off"

    def start(self) -> None:
        """Load it without waiting for that; from then on save it whenever the engine is idle, and at exit."""
        atexit.register(self.save)  # runs when the engine's thread has ended
        threading.Thread(target=self._save_when_idle, daemon=True, name="memory").start()

    def open(self) -> None:
        """Give the engine the memory of its model, unless it is switched off or another app uses it.

        A file that cannot be used is set aside, with a warning.
        """
        self._release()
        self.path = model_file("memory", self._replies.engine.model)
        if self._off.exists():
            return
        try:
            self._acquire(self.path)
            self.why_off = ""
        except OSError as error:
            self.why_off = f"It cannot be used: {error}."
            log.warning("the memory is off: %s", error)
            return
        memory = Memory()
        try:
            memory.load(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("the memory cannot be read: %s", error)
        except ValueError as error:
            log.warning("%s: it is kept as %s, and the memory begins empty", error, set_aside(self.path).name)
        self._saved = memory.clock
        self._replies.engine.use_memory(memory)
        self._tabs.cool()

    def close(self) -> None:
        """Save, and take the memory from the engine."""
        self.save()
        self._replies.engine.use_memory(None)
        self._tabs.cool()
        self._release()

    def _acquire(self, path: Path) -> None:
        """Be the only app that uses the file; raises OSError if that cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(f"{path}.lock", mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise OSError("another app on this machine is using it") from None
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self) -> None:
        """Write to the disk, if there is anything new."""
        memory = self.memory
        if memory is None or self.path is None or memory.clock == self._saved:
            return
        self._saved = memory.clock  # a full disk is complained of once, and again when there is more to write
        try:
            memory.save(self.path)
        except OSError as error:
            log.warning("the memory cannot be saved: %s", error)

    def switch(self, on: bool) -> None:
        """Turn it on or off, for later starts, too. While it is off nothing is looked up, learnt or saved."""
        if on:
            self._off.unlink(missing_ok=True)
            self.open()
        else:
            self.close()
            self.why_off = ""
            self._off.parent.mkdir(parents=True, exist_ok=True)
            self._off.touch()

    def wipe(self) -> None:
        """Forget all about chats with this model: empty the memory, delete its file. Raises OSError if that cannot be."""
        if self.memory is not None:
            with self._figures:
                self.memory.wipe()
            self._saved = self.memory.clock
        if self.path is None:
            return
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            return
        self._acquire(self.path)
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self._release()

    def read(self, file: Path) -> int:
        """Take in the text in ``file``; its number of tokens. Raises ValueError if it is not text or the memory is off."""
        if self.memory is None:
            raise ValueError("the memory is off")
        text = file.read_bytes().decode("utf-8")
        if "\0" in text:
            raise ValueError("not text")
        token_ids = self._replies.engine.tokenizer.encode(text, add_special_tokens=False)
        self.memory.read(token_ids)
        return len(token_ids)

    def note(self, chat: Chat, settings: Settings, stats: Stats) -> None:
        """Keep the figures of a reply, if a tree with the memory behind it wrote it."""
        with self._figures:
            if self.memory is not None and settings.decoding == "tree" and stats.passes:
                self.memory.note(Remembered(_number(chat), stats.tokens, stats.passes))

    def line(self, chat: Chat) -> str:
        """Tokens per pass in this chat and in the others; empty while there is nothing to compare."""
        replies = [] if self.memory is None else self.memory.replies
        here = [reply for reply in replies if reply.chat == _number(chat)]
        before = [reply for reply in replies if reply.chat != _number(chat)]
        if not here or not before:
            return ""
        return f"tokens/pass {rate(here):.1f} here, {rate(before):.1f} in other chats"

    def _save_when_idle(self) -> None:
        task = self.open
        while True:
            try:
                self._replies.service.call(task)
            except ClosedError:  # the program is ending; `save` runs once more at exit
                return
            except Exception:
                log.exception("the memory failed; the chats go on")
            task = self.save
            time.sleep(GLANCE)
            while not self._replies.line.idle:
                time.sleep(GLANCE)


def rate(replies: Sequence[Remembered]) -> float:
    """Tokens per pass over several replies."""
    return sum(reply.tokens for reply in replies) / max(sum(reply.passes for reply in replies), 1)


def count(number: int, what: str) -> str:
    """``number`` with its noun."""
    plural = "" if number == 1 else "ies" if what.endswith("y") else "s"
    return f"{number:,} {what.removesuffix('y') if plural == 'ies' else what}{plural}"


def _number(chat: Chat) -> int:
    return zlib.crc32(chat.id.encode())


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

    def __init__(self, store: MemoryStore, replies: Replies, tab: gr.Tab, owner: str | None = None) -> None:
        self._store = store
        self._owner = owner
        self._replies = replies
        switch = gr.Checkbox(store.on, label="Remember across chats", info=_PRIVACY, elem_id="memory-switch")
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
        switch.input(in_own_thread(self.switch), switch, [summary, line], concurrency_limit=None, **quiet)
        for button in (files, folder):
            button.upload(in_own_thread(self.read), button, [summary, line], concurrency_limit=None, **quiet)
        wipe.click(lambda: gr.update(visible=True), outputs=confirm, queue=False, **quiet)
        gr.on([keep.click, wipe_now.click], lambda: gr.update(visible=False), outputs=confirm, queue=False, **quiet)
        wipe_now.click(in_own_thread(self.wipe), None, [summary, line], concurrency_limit=None, **quiet)

    def show(self) -> tuple[bool, str]:
        """How switch and summary stand."""
        self._check()
        return self._store.on, self.summary()

    def switch(self, on: bool) -> Generator[tuple[Any, str], None, None]:
        """Turn the memory on or off."""
        said = "On: from now on chats are remembered." if on else "Off. What was remembered before stays until you wipe it."
        yield from self._change(partial(self._store.switch, on), said)

    def wipe(self) -> Generator[tuple[Any, str], None, None]:
        """Forget everything."""
        yield from self._change(self._store.wipe, "Wiped: nothing is remembered, and the file is deleted.")

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
                    tokens += self._take_turn(partial(self._store.read, file))
                except ValueError:
                    refused.append(file.name)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        yield self.summary(), _line(_taken_in(tokens, len(named) - len(refused), refused, self._store.on))

    def summary(self) -> str:
        """What is remembered, as HTML."""
        memory, path = self._store.memory, self._store.path
        size = _size(path) if path is not None and path.exists() else "nothing on disk"
        if memory is None:
            return f"<p>Off; {size}.{' ' + escape(self._store.why_off) if self._store.why_off else ''}</p>"
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
