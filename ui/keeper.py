"""The keeper of the memory across chats: turns it on and off, loads it, saves it while nobody waits, wipes it.

All this happens in the engine's thread, between two replies. The memory is one file for each model; a switch that was turned
off stays off at the next start.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.folders import cache_folder, model_file
from specdec.serving.service import ClosedError
from specdec.speculators.memory import Memory, Remembered
from specdec.speculators.storage import set_aside
from specdec.stats import Stats
from ui.chats import Chat, Tabs
from ui.replies import Replies
from ui.settings import Settings

log = logging.getLogger(__name__)

GLANCE = 2.0
"""Seconds between two looks at whether there is something to save and nobody who would wait for it."""


class MemoryKeeper:
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
        self._replies.engine.memory = memory
        self._tabs.cool()

    def close(self) -> None:
        """Save, and take the memory from the engine."""
        self.save()
        self._replies.engine.memory = None
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
