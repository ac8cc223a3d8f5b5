"""The chat's event handlers: what a click or a key does to the chat of its tab, and what the page shows of it.

Every handler finds its chat by the session of the request; nothing of one tab is reachable from another.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from typing import Any

import gradio as gr

from specdec.devices import dtype_name
from specdec.engine import SpeculativeEngine
from specdec.serving.service import Service
from ui.audit import GOOD, PREFIX, check
from ui.compare import Comparisons
from ui.errors import explain
from ui.markdown import as_typed, original, safe_markdown
from ui.memory import MemoryStore
from ui.panel import PanelFeed
from ui.replies import Replies
from ui.settings import Settings, own_settings
from ui.state import MAX_MESSAGES, MAX_TEXT, Chat, Message, Tabs, Writing, read_messages
from ui.stream import NOTHING, SKIP, STILL, Frame
from ui.visitors import PRIVATE, LimitError, Limits, TooManyError

_LONGEST_NAME = 64  # of a session or a chat; clients choose them
_GLANCE = 0.1  # seconds between two looks at whether a client's message before has been answered
_SEPARATOR = "\N{INVISIBLE SEPARATOR}"
_safe_markdown_once = lru_cache(maxsize=512)(safe_markdown)  # every frame shows every message, and only the last one changes
_REASONING = re.compile(r"\s*[<\[](think|thinking|thought|reasoning|THINK)[>\]](.*?)(?:[<\[]/\1[>\]]\n*(.*))?", re.DOTALL)


class ChatHandlers:
    """Event handlers over one service; each takes the page's setting fields last, in the order of `Settings.read`.

    With ``memory`` the engine remembers across chats, once `store` is started.
    """

    def __init__(self, service: Service, limits: Limits = PRIVATE, memory: bool = False) -> None:
        self.tabs = Tabs(limits.kept_seconds)
        self.replies = Replies(service, limits)
        self.comparisons = Comparisons(self.replies)
        self.memory_store = MemoryStore(self.replies, self.tabs) if memory else None
        if self.memory_store is not None:
            self.replies.listen(self.memory_store.note)

    @property
    def engine(self) -> SpeculativeEngine:
        """The engine in use; `ui.models` may exchange it."""
        return self.replies.engine

    @property
    def model_facts(self) -> dict[str, str]:
        """The model in use, for display."""
        return {
            "name": self.engine.name,
            "dtype": dtype_name(self.engine.model.dtype),
            "device": str(self.engine.target.device),
        }

    @property
    def own_settings(self) -> str:
        """What the model's generation config sets for which the page has no field, for display."""
        return own_settings(self.engine.model)

    def send(self, text: str, request: gr.Request, *settings: Any) -> Generator[Frame, None, None]:
        """Answer a new message."""
        if text.strip():
            yield from self._ask(_tab(request), text, settings, box=_box(busy=True, value=""))

    def retry(self, request: gr.Request, *settings: Any) -> Generator[Frame, None, None]:
        """Answer the last question again."""
        chat = self._chat(request)
        if chat.messages:
            yield from self._ask(_tab(request), chat.take_back(len(chat.messages)), settings)

    def edit(self, data: gr.EditData, request: gr.Request, *settings: Any) -> Generator[Frame, None, None]:
        """Answer a question that was changed; what followed it is gone. Nothing is no question: then all stays."""
        chat = self._chat(request)
        text = original(_plain(data.value))
        if not text.strip():
            yield self._whole(chat)
            return
        owners = [number for number, message in enumerate(chat.messages) for _ in show(message)]
        with _refusing():
            self._check(chat, text, Settings.read(*settings))
        row = data.index[0] if isinstance(data.index, list | tuple) else data.index
        if row < len(owners):
            chat.take_back(owners[row])
        yield from self._ask(_tab(request), text, settings)

    def undo(self, request: gr.Request) -> Frame:
        """Take the last question back into the message box."""
        chat = self._chat(request)
        text = chat.take_back(len(chat.messages)) if chat.messages else ""
        return self._whole(chat, value=text)

    def stop(self, request: gr.Request) -> None:
        """End the reply; what it has said stays."""
        self._chat(request).stop()

    def audit(self, request: gr.Request) -> Generator[Frame, None, None]:
        """Let the target check the last reply. The progress, and finally the verdict, is written below it."""
        tab = _tab(request)
        chat = self.tabs.chat(tab)
        if chat.busy:
            gr.Info("The audit checks a finished reply: wait until this one has ended, or stop it.")
            return
        if not chat.messages:
            return
        with _refusing(), self.replies.pending.place():
            yield from self._audit(tab, chat)

    def _audit(self, tab: str, chat: Chat) -> Iterator[Frame]:
        reply = chat.messages[-1]
        kept = others = [notice for notice in reply.notices if not notice.startswith(PREFIX)]
        try:
            with closing(check(self.replies, chat)) as lines:
                for line in lines:
                    reply.notices = [*others, line]
                    if not self.tabs.shows(tab, chat):
                        return
                    yield self._frame(chat)
            kept = reply.notices
            yield self._frame(chat, saved=_saved(chat))
        finally:
            reply.notices = kept

    def settle(self, request: gr.Request) -> Frame:
        """The whole state of the chat, once a reply has ended or its chat was left. It corrects whatever came late."""
        return self._whole(self._chat(request))

    def whole(self, request: gr.Request) -> Any:
        """The whole of the latest reply, for a panel that lacks some of its steps."""
        writing = self._chat(request).writing
        if writing is None:
            return SKIP
        answer, writing.whole = writing.whole(), str
        return answer or SKIP

    def clear(self, request: gr.Request) -> Frame:
        """Begin a new chat; the old one stays among the saved ones."""
        left = self._chat(request)
        return self._whole(self.tabs.new(_tab(request)), left)

    def open(self, data: gr.EventData, request: gr.Request) -> Frame:
        """Show a saved chat that the page hands in."""
        try:
            chat_id, messages = (
                str(data.id),
                read_messages(data.messages, min(2 * self.replies.limits.chat_characters, MAX_TEXT)),
            )
            if len(chat_id) > _LONGEST_NAME:
                raise ValueError("no id of a chat")
        except (ValueError, AttributeError):
            gr.Warning("This saved chat cannot be read; it may come from another version.")
            return NOTHING
        left = self._chat(request)
        return self._whole(self.tabs.open(_tab(request), chat_id, messages), left)

    def delete(self, data: gr.EventData, request: gr.Request) -> Frame:
        """Forget a saved chat that the user deleted; where the tab shows it a new one begins."""
        shown = self._chat(request)
        chat = self.tabs.delete(_tab(request), str(data.id))
        return NOTHING if chat is shown else self._whole(chat)

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or reloaded."""
        self.tabs.close(_tab(request))
        self.comparisons.stop(_tab(request))

    def api(
        self,
        message: str,
        request: gr.Request,
        system_prompt: str = "",
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        decoding: str = "tree",
        budget: str = "auto",
    ) -> Generator[str, None, None]:
        """Chat with the model: the reply to ``message``, growing.

        The turns of one client session are one conversation, answered one after the other.
        temperature 0 is greedy. decoding: "tree", "linear" or "plain"; budget: "auto" or a number of nodes.
        """
        try:
            settings = Settings.read(decoding, budget, temperature, top_p, seed, max_tokens, system_prompt)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None
        if not isinstance(message, str) or not message.strip():
            raise gr.Error("message must be a text, and not empty.", print_exception=False)
        chat = self._chat(request)
        with _refusing(), self.replies.pending.place():
            self._check(chat, message, settings)
            place = object()
            chat.line.append(place)
            try:
                while chat.line[0] is not place or chat.busy:  # the client's message before this one is still answered
                    yield STILL
                    time.sleep(_GLANCE)
                writing = chat.ask(message)
            finally:
                chat.line.remove(place)
            reply = writing.reply
            with closing(self.replies.write(chat, writing, settings, details=False)) as batches:
                for steps in batches:
                    yield reply.text if steps else STILL
        if reply.state == "failed":
            raise gr.Error(reply.notices[-1], print_exception=False)
        yield reply.text

    def _ask(self, tab: str, text: str, values: tuple[Any, ...], box: Any = None) -> Generator[Frame, None, None]:
        """Answer ``text`` in the tab's chat, for as long as the tab shows it."""
        settings = Settings.read(*values)
        chat = self.tabs.chat(tab)
        with _refusing(), self.replies.pending.place():
            self._check(chat, text, settings)
            yield from self._answer(tab, chat, text, settings, box)

    def _check(self, chat: Chat, text: str, settings: Settings) -> None:
        """Refuse what is too long for this page, before anything of it is kept. Raises LimitError."""
        self.replies.check(text, settings)
        if chat.characters + len(text) > self.replies.limits.chat_characters or len(chat.messages) >= MAX_MESSAGES:
            raise LimitError("this chat is full: begin a new one")

    def _answer(self, tab: str, chat: Chat, text: str, settings: Settings, box: Any) -> Iterator[Frame]:
        writing = chat.ask(text)
        reply = writing.reply
        feed = PanelFeed(
            self.model_facts,
            settings.facts(),
            chat.prompt(settings.system_prompt),
            lambda token_ids: self.engine.token_texts(token_ids),
        )
        try:
            with closing(self.replies.write(chat, writing, settings, details=True)) as batches:
                next(batches)
                yield self._frame(chat, box=box or _box(busy=True), panel=feed.start(), saved=_saved(chat))
                for steps in batches:
                    if not self._shows(tab, chat, writing):
                        continue
                    if steps and not feed.recorder.records:  # another model may have come while this reply waited
                        feed.start(self.model_facts)
                    yield self._frame(chat, panel=feed.steps(steps) if steps else feed.note(writing.place))
        finally:
            end = partial(feed.error, reply.notices[-1]) if reply.state == "failed" else partial(feed.end, writing.reason)
            if feed.is_long:
                writing.whole = partial(end, whole=True)
            writing.unheard = end()
        if self._shows(tab, chat, writing):
            yield self._frame(chat, panel=writing.unheard)
            writing.unheard = ""

    def _shows(self, tab: str, chat: Chat, writing: Writing) -> bool:
        """Whether the tab still shows this reply: not another chat, nor the next reply."""
        return self.tabs.shows(tab, chat) and chat.writing is writing

    def _chat(self, request: gr.Request) -> Chat:
        return self.tabs.chat(_tab(request))

    def _whole(self, chat: Chat, left: Chat | None = None, **box: Any) -> Frame:
        """All of a chat as it stands; ``left``: the one that the tab showed before."""
        panel = "" if chat.writing is None else chat.writing.unheard or SKIP
        return self._frame(chat, _box(chat.busy, **box), panel, self._meter(chat), _saved(chat, left))

    def _frame(self, chat: Chat, box: Any = SKIP, panel: Any = SKIP, meter: Any = SKIP, saved: Any = SKIP) -> Frame:
        return [row for message in chat.messages for row in show(message)], box, panel, meter, saved

    def _meter(self, chat: Chat) -> str:
        if chat.finished is None:
            return ""
        used, limit = len(chat.finished.prompt.token_ids) + len(chat.finished.token_ids), self.engine.target.context_limit
        share = min(100 * used / limit, 100)
        return (
            f'<div role="meter" aria-label="context used" aria-valuemin="0" aria-valuemax="{limit}" aria-valuenow="{used}">'
            f'<span class="track"><span style="width:{share:.1f}%"></span></span>context {used:,} of {limit:,}</div>'
            + (
                f'<div class="worth">{line}</div>'
                if self.memory_store is not None and (line := self.memory_store.line(chat))
                else ""
            )
        )


def show(message: Message) -> list[dict[str, Any]]:
    """A message as rows of the chatbot: folded reasoning if there is any, inert text, and below it our own lines.

    The lines are a part of their own; the invisible separators around it are for the page's copy button, which leaves it out.
    """
    rows: list[dict[str, Any]] = []
    text = message.text
    if message.role == "assistant" and (reasoning := _REASONING.fullmatch(text)):
        _, thought, answer = reasoning.groups()
        fold = {"title": "Reasoning", "status": "pending" if answer is None else "done"}
        rows.append({"role": "assistant", "content": safe_markdown(thought.strip()), "metadata": fold})
        text = answer or ""
    lines: list[str] = []
    for number, notice in enumerate(message.notices, start=1):
        line, _, details = safe_markdown(notice).replace("*", "").partition("\n")
        failed = message.state == "failed" and number == len(message.notices)
        mark = "**" if failed else "***" if line.startswith(GOOD) else "*"
        lines += [f"{mark}{line}{mark}", *details.splitlines()]
    lines += [safe_markdown(message.footer)] if message.footer else []
    disarm = as_typed if message.role == "user" else safe_markdown if message.state == "writing" else _safe_markdown_once
    parts = [disarm(text) or ("…" if message.state == "writing" else "No reply.")]
    if lines:
        parts.append(_SEPARATOR + "  \n".join(lines) + " " + _SEPARATOR)  # right behind a full stop it would undo emphasis
    rows.append({"role": message.role, "content": [{"type": "text", "text": part} for part in parts]})
    return rows


def _plain(value: Any) -> str:
    """The text of an edited message, which comes as text or as a list of parts."""
    if isinstance(value, list):
        return "".join(map(_plain, value))
    return str(value["text"]) if isinstance(value, dict) else str(value)


@contextmanager
def _refusing() -> Iterator[None]:
    """Tell the visitor why this page refuses what they ask."""
    try:
        yield
    except (LimitError, TooManyError) as error:
        raise gr.Error(explain(error), print_exception=False) from None


def _tab(request: gr.Request) -> str:
    if len(request.session_hash or "") > _LONGEST_NAME:
        raise gr.Error("The name of this session is too long.", print_exception=False)
    return request.session_hash or secrets.token_hex(16)  # who has no session shares nothing with anybody


def _saved(chat: Chat, left: Chat | None = None) -> str:
    """What the list of saved chats is told; a chat that was ``left`` comes along if a reply in it may have been cut off."""
    cut = left.to_json() if left is not None and left.writing is not None else None
    return json.dumps({"current": chat.id, "chat": chat.to_json() if chat.messages else None, "left": cut})


def _box(busy: bool, **more: Any) -> Any:
    """The message box with its Send or its Stop button; a text that is being typed stays, unless ``value`` says otherwise."""
    return gr.update(submit_btn=not busy, stop_btn=busy, **more)
