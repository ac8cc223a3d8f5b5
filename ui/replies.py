"""Replies: from a chat and its settings to a reply that grows. One service writes those of every tab, several at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt, PromptError, encode, fair_share
from specdec.serving.line import GaveUp
from specdec.serving.service import Service
from specdec.stats import Stats
from specdec.step import Step
from ui.decoder import Decoder
from ui.environment import ON_ZEROGPU
from ui.errors import explain
from ui.settings import Settings
from ui.state import Chat, Finished, Writing
from ui.stop import ENDING, Clock
from ui.stream import INTERVAL, Producer
from ui.visitors import PRIVATE, LimitError, Limits, Pending, visitor
from ui.zerogpu import LentDecoder

T = TypeVar("T")

_UNWATCHED = 0.2
"""Seconds between two updates of a reply of which only the text is read; each takes the interpreter lock from the engine."""

_ENDINGS = {
    "length": "reached the limit of {max_tokens} tokens",
    "context": "the model's context is full",
    "cancelled": "stopped",
    "time": "stopped: this page's limit is {seconds:.0f} seconds",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """Others come first; ``ahead`` of them."""

    ahead: int


def in_line(ahead: int) -> str:
    """What to tell somebody who waits for a turn: ``ahead`` others come first, with a reply, a comparison, a model to load."""
    return f"waiting: {'1 reply is' if ahead == 1 else f'{ahead} replies are'} ahead of this one"


@dataclass(frozen=True, slots=True)
class Reading:
    """It is this reply's turn: the target reads the prompt."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Preparing:
    """What the engine prepares before it goes on, in words."""

    text: str


Event = Waiting | Reading | Preparing | Step


class Replies:
    """Writes replies into chats, each within ``limits``."""

    def __init__(self, service: Service, limits: Limits = PRIVATE) -> None:
        self.limits = limits
        self.service = service
        self.decoder = LentDecoder(service) if ON_ZEROGPU else Decoder(service)
        self.line = service.line
        self.pending = Pending(limits.pending)
        self._listeners: list[Callable[[Chat, Settings, Stats], None]] = []

    @property
    def engine(self) -> SpeculativeEngine:
        """The engine in use; `ui.models` may exchange it."""
        return self.decoder.engine

    def turn(
        self, cancelled: Callable[[], bool], waiting: Callable[[int], None], *, alone: bool = False
    ) -> AbstractContextManager[None]:
        """A turn of the present visitor, see `specdec.serving.line.Line.turn`; it is given up, too, once the program ends."""
        return self.line.turn(visitor() or object(), lambda: cancelled() or ENDING.is_set(), waiting, alone=alone)

    def take(self, work: Callable[[], T], cancelled: Callable[[], bool], waiting: Callable[[int], None]) -> T:
        """What ``work()`` returns, done in the device's thread while no reply is written."""
        with self.turn(cancelled, waiting, alone=True):
            return self.service.call(work)

    def listen(self, listener: Callable[[Chat, Settings, Stats], None]) -> None:
        """Let ``listener`` hear the figures of every reply."""
        self._listeners.append(listener)

    def _owner(self) -> Hashable:
        """Who may start from the K/V of the present visitor's texts: on one's own machine every chat, else the visitor's."""
        return "page" if self.limits is PRIVATE else visitor()

    def check(self, text: str, settings: Settings) -> None:
        """Refuse a question that is far too long, before anything of it is kept. Raises LimitError."""
        self.limits.check((text, settings.system_prompt), self.engine.target.context_limit)

    def fit(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Prompt:
        """``messages`` as a prompt, the oldest left out where they and a fair reply do not fit the context together.

        Raises PromptError, or LimitError where it is this page that reads no more.
        """
        context, limits = self.engine.target.context_limit, self.limits
        limits.check((messages[0]["content"], messages[-1]["content"]), context)
        messages, left_out = _latest(messages, limits.characters(context))
        share = fair_share(max_tokens, context)
        if limits.prompt_tokens >= context - share:
            prompt = encode(self.engine.tokenizer, messages, context - 1, share)
        else:
            try:
                prompt = encode(self.engine.tokenizer, messages, limits.prompt_tokens)
            except PromptError as error:
                raise LimitError(limits.too_long(context)) from error
        return replace(prompt, trimmed=prompt.trimmed + left_out)

    def write(self, chat: Chat, writing: Writing, settings: Settings, details: bool) -> Generator[list[Step], None, None]:
        """Let the reply that `Chat.ask` began grow.

        Yields at once, then whenever it has changed, with the steps that changed it (none: it waits or reads). However this
        ends, by itself, by `Writing.stop`, by an error or because nobody listens any more, the reply stays in the chat and
        says so.
        """
        reply, stop = writing.reply, writing.stop
        asked, settings = settings, self.limits.settings(settings)
        clock = Clock(stop, self.limits.seconds)
        messages = chat.prompt(settings.system_prompt)
        stats = Stats()
        token_ids: list[int] = []
        prompt: Prompt | None = None
        opened = ""
        step: Step | None = None
        notes: Counter[str] = Counter()
        try:
            yield []
            for events in self._events(chat, messages, settings, stop, clock, details):
                for event in events:
                    match event:
                        case Waiting(ahead):
                            reply.footer = writing.place = in_line(ahead)
                        case Reading():
                            writing.place = ""
                            prompt, opened = event.prompt, event.prompt.opened
                            reply.footer = f"reading {len(prompt.token_ids):,} tokens"
                            reply.notices = self._trimmed(prompt)
                        case Preparing(text):
                            reply.footer = f"{text} …"
                        case Step():
                            step = event
                            stats.add(step)
                            notes.update(filter(None, [step.note]))
                            token_ids += step.token_ids
                            reply.text = (reply.text or opened) + step.text
                            reply.footer = ""
                yield [event for event in events if isinstance(event, Step)]
            reply.state = "done" if step is not None and step.finish_reason not in (None, "cancelled") else "stopped"
            if not stats.drafted:
                reply.notices += [note for note, _ in notes.most_common(1)]
        except Exception as error:
            reply.state = "failed"
            reply.notices.append(explain(error))
        finally:
            stop.set()
            for listener in self._listeners:
                listener(chat, settings, stats)
            if reply.state == "writing":
                reply.state = "stopped"
            reason = "cancelled" if step is None or step.finish_reason is None else step.finish_reason
            writing.reason = "time" if reason == "cancelled" and clock.late else reason
            ending = "" if reply.state == "failed" else self._ending(writing.reason, asked)
            reply.footer = " · ".join(filter(None, [figures(stats, settings), ending]))
            if prompt is not None and token_ids and chat.writing is writing:
                chat.finished = Finished(prompt, tuple(token_ids), settings)

    def _ending(self, reason: str, asked: Settings) -> str:
        """``reason`` in words; empty if the reply said all."""
        if reason == "length" and asked.max_tokens > self.limits.reply_tokens:
            return f"this page's limit is {self.limits.reply_tokens:,} tokens"
        return _ENDINGS.get(reason, "").format(max_tokens=asked.max_tokens, seconds=self.limits.seconds)

    def _trimmed(self, prompt: Prompt) -> list[str]:
        if not prompt.trimmed:
            return []
        what = "message was" if prompt.trimmed == 1 else f"{prompt.trimmed} messages were"
        limited = self.limits.prompt_tokens < self.engine.target.context_limit
        why = f"this page reads at most {self.limits.prompt_tokens:,} tokens" if limited else "context full"
        return [f"{why}: the oldest {what} left out"]

    def _events(
        self, chat: Chat, messages: list[dict[str, str]], settings: Settings, stop: threading.Event, clock: Clock, details: bool
    ) -> Iterator[list[Event]]:
        def produce(put: Callable[[Event], None]) -> None:
            with (
                suppress(GaveUp),
                self.turn(stop.is_set, lambda ahead: put(Waiting(ahead))),
                self.service.telling(lambda text: put(Preparing(text))),
                chat.writer,  # the reply before has been stopped, and may have a step to go
            ):
                prompt = self.fit(messages, settings.max_tokens)
                put(Reading(prompt))
                chat.conversation = chat.conversation or self.decoder.conversation()
                for step in self.decoder.steps(chat.conversation, prompt, settings, clock.ends, details, self._owner()):
                    put(step)

        return Producer(produce).batches(INTERVAL if details else _UNWATCHED)


def _latest(messages: Sequence[Mapping[str, str]], characters: int) -> tuple[Sequence[Mapping[str, str]], int]:
    """A chat without the oldest questions and answers that cannot fit ``characters``, and how many messages those are.

    So that what would be left out of the prompt anyway is not even tokenised.
    """
    first = 1 if messages[0]["role"] == "system" else 0
    start = len(messages) - 1
    room = characters - len(messages[-1]["content"])
    while start > first:
        room -= sum(len(message["content"]) for message in messages[start - 2 : start])
        if room < 0:
            break
        start -= 2
    return [*messages[:first], *messages[start:]], start - first


def figures(stats: Stats, settings: Settings) -> str:
    """The figures of a reply, in one line."""
    if not stats.tokens:
        return ""
    parts = [f"{stats.tokens} tok", f"{stats.tokens_per_second:.0f} tok/s"]
    if settings.decoding != "plain":
        parts += [f"{stats.tokens_per_pass:.1f} tokens/pass", f"{stats.speedup:.1f}x plain"]
    if settings.temperature > 0:
        parts.append(f"seed {settings.seed}")
    return " · ".join(parts)
