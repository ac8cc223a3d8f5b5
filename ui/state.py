"""Chats: what was said in each browser tab, and the engine's memory of it.

The server holds the chat of every open tab, so a reply that nobody receives any more is still kept. A closed tab gives
its K/V back at once; its text is remembered for a while, so that a reloaded page finds even a half-finished reply again.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec.conversation import Conversation
from specdec.prompt import Prompt
from ui.settings import Settings
from ui.visitors import Shared

Role = Literal["user", "assistant"]
State = Literal["writing", "done", "stopped", "failed"]

MAX_WARM = 8
"""Chats that keep their K/V; the least recently used gives it up first and is simply read again when it goes on."""
MAX_TABS = 256
MAX_CLOSED = 256
MAX_MESSAGES = 1000
"""Messages of one chat."""
MAX_TEXT = 2_000_000
"""Characters of one chat on one's own machine."""


@dataclass(slots=True)
class Message:
    """One message. ``notices`` are lines of ours below a reply, ``footer`` its figures."""

    role: Role
    text: str = ""
    state: State = "done"
    notices: list[str] = field(default_factory=list)
    footer: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the browser stores it."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def read(cls, raw: Any) -> Message:
        """A message as the browser stored it; raises ValueError for anything else."""
        match raw:
            case {"role": "user" | "assistant" as role, "text": str(text)}:
                footer, notices = raw.get("footer", ""), raw.get("notices", [])
                was = raw.get("state")
                state: State = "failed" if was == "failed" else "stopped" if was in ("stopped", "writing") else "done"
                lines = [line for line in notices if isinstance(line, str)] if isinstance(notices, list) else []
                return cls(role, text, state, lines, footer if isinstance(footer, str) else "")
        raise ValueError("not a message")


@dataclass(slots=True, eq=False)
class Writing:
    """A reply that is being written; set ``stop`` and it ends within a step.

    ``place`` tells its place in the queue while it waits, ``reason`` why it ended: a finish reason of a step, or "time".
    ``unheard`` is what the panel has yet to be told of the end, ``whole`` tells it all of a long reply again.
    """

    reply: Message
    stop: threading.Event = field(default_factory=threading.Event)
    place: str = ""
    reason: str = ""
    unheard: str = ""
    whole: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Finished:
    """What was decoded, exactly: the prompt, every emitted token, and the settings."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    settings: Settings


@dataclass(slots=True, eq=False)
class Chat:
    """One conversation as a tab shows it: questions, each followed by its reply.

    ``conversation`` is the engine's side of it, None while it holds no K/V. ``writing`` is the latest reply's,
    ``writer`` is held by whoever writes one,
    ``finished`` the latest one that was decoded here, for whoever wants to check it. ``line``: who waits to ask, the first
    comes first.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    messages: list[Message] = field(default_factory=list)
    conversation: Conversation | None = None
    writing: Writing | None = None
    writer: threading.Lock = field(default_factory=threading.Lock)
    finished: Finished | None = None
    line: list[object] = field(default_factory=list)

    @property
    def characters(self) -> int:
        """Of all its messages."""
        return sum(len(message.text) for message in self.messages)

    @property
    def busy(self) -> bool:
        """Whether a reply is being written."""
        return self.writing is not None and self.writing.reply.state == "writing"

    def ask(self, question: str) -> Writing:
        """Add a question and its reply, still to be written; one that is being written ends.

        Half a surrogate pair, which is no text, becomes a question mark.
        """
        self.stop()
        question = question.encode("utf-8", "replace").decode("utf-8")
        reply = Message("assistant", state="writing")
        self.messages += [Message("user", question), reply]
        self.finished = None
        self.writing = Writing(reply)
        return self.writing

    def stop(self) -> None:
        """End the reply that is being written, if any."""
        if self.writing is not None:
            self.writing.stop.set()

    def take_back(self, index: int) -> str:
        """Remove the question at or before message ``index`` with all that followed it; the question's text."""
        self.stop()
        question = max(min(index, len(self.messages) - 1), 0) // 2 * 2
        text = self.messages[question].text
        del self.messages[question:]
        self.writing = self.finished = None
        return text

    def prompt(self, system_prompt: str) -> list[dict[str, str]]:
        """What the model is to read: every question with its reply, then the open question.

        A question that got no reply (it failed, or was stopped at once) is left out: many chat templates insist on
        questions and answers in turn.
        """
        prompt = [{"role": "system", "content": system_prompt}] if system_prompt else []
        *earlier, (open_question, _) = zip(self.messages[::2], self.messages[1::2], strict=True)
        for question, reply in earlier:
            if reply.text:
                prompt += [{"role": "user", "content": question.text}, {"role": "assistant", "content": reply.text}]
        return [*prompt, {"role": "user", "content": open_question.text}]

    def title(self) -> str:
        """The first words of the first question."""
        words = " ".join(self.messages[0].text.split()) if self.messages else ""
        return words if len(words) <= 60 else words[:59].rstrip() + "…"

    def to_json(self) -> dict[str, Any]:
        """As the browser stores it."""
        return {"id": self.id, "title": self.title(), "messages": [message.to_json() for message in self.messages]}


def read_messages(raw: Any, characters: int = MAX_TEXT) -> list[Message]:
    """The messages of a chat as the browser stored it. Raises ValueError for anything else, or more than ``characters``."""
    if not isinstance(raw, list):
        raise ValueError("no list of messages")
    if len(raw) > MAX_MESSAGES:
        raise ValueError("too many messages")
    messages = [Message.read(message) for message in raw]
    if sum(len(str(message)) for message in messages) > characters:
        raise ValueError("too long")
    if [message.role for message in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError("questions and answers must take turns")
    return messages


class Tabs:
    """The chat of each open tab (of each session of a client), by its session hash.

    What nobody used for ``kept_seconds`` is forgotten.
    """

    def __init__(self, kept_seconds: float = math.inf) -> None:
        self._chats: Shared[Chat] = Shared(MAX_TABS, kept_seconds, lambda chat: chat.busy, self._close)
        self._closed: Shared[list[Message]] = Shared(MAX_CLOSED, kept_seconds)
        self._lock = threading.Lock()

    def chat(self, tab: str) -> Chat:
        """The tab's chat, a new one if it has none."""
        with self._lock:
            return self._show(tab, self._chats.get(tab) or Chat())

    def new(self, tab: str) -> Chat:
        """A new, empty chat for the tab; a reply that is being written in the old one ends."""
        with self._lock:
            self._leave(tab)
            return self._show(tab, Chat())

    def open(self, tab: str, chat_id: str, messages: list[Message]) -> Chat:
        """Show a saved chat in the tab: as this server knows it, else with ``messages``.

        One that it shows already stays as it is. A chat that another tab shows is opened as a copy of its own, so that two
        tabs never write into one.
        """
        with self._lock:
            present = self._chats.get(tab)
            if present is not None and present.id == chat_id:
                return self._show(tab, present)
            self._leave(tab)
            shown = next((chat for chat in self._chats.values() if chat.id == chat_id), None)
            if shown is not None:
                return self._show(tab, Chat(messages=[_copy(message) for message in shown.messages]))
            return self._show(tab, Chat(chat_id, self._closed.get(chat_id) or messages))

    def delete(self, tab: str, chat_id: str) -> Chat:
        """Forget a closed chat, or the one that the tab shows; the tab's chat then, maybe a new one."""
        with self._lock:
            present = self._chats.get(tab)
            if present is not None and present.id == chat_id:
                self._leave(tab)
            self._closed.pop(chat_id)
            return self._show(tab, self._chats.get(tab) or Chat())

    def close(self, tab: str) -> None:
        """The tab is gone: its reply ends, its K/V is freed, its text is remembered for a while."""
        with self._lock:
            self._leave(tab)

    def cool(self) -> None:
        """Every chat gives up the engine's side of it: its K/V, to be read again when it goes on, and what could be audited."""
        with self._lock:
            for chat in self._chats.values():
                chat.conversation = chat.finished = None

    def shows(self, tab: str, chat: Chat) -> bool:
        """Whether the tab is there and shows this chat."""
        return self._chats.get(tab) is chat

    def __len__(self) -> int:
        return len(self._chats)

    def _leave(self, tab: str) -> None:
        chat = self._chats.pop(tab)
        if chat is not None:
            self._close(tab, chat)

    def _close(self, tab: str, chat: Chat) -> None:
        chat.stop()
        chat.conversation = None
        if chat.messages:
            self._closed.put(chat.id, chat.messages)

    def _show(self, tab: str, chat: Chat) -> Chat:
        self._chats.put(tab, chat)
        for cold in self._chats.values()[:-MAX_WARM]:
            cold.conversation = None
        return chat


def _copy(message: Message) -> Message:
    state: State = "stopped" if message.state == "writing" else message.state
    return Message(message.role, message.text, state, list(message.notices), message.footer)
