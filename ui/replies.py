"""Replies: from a chat and its settings to a reply that grows.

One engine serves every tab, one reply at a time. `decode` is the whole way into the engine, with plain arguments and
steps coming out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specdec.engine import Conversation, SpeculativeEngine
from specdec.prompt import Prompt, PromptError, encode
from specdec.request import RequestError
from specdec.stats import Stats
from specdec.step import Step
from ui.chats import Chat, Finished, Writing
from ui.pump import Pump
from ui.settings import Settings
from ui.turns import GaveUp, Turns

log = logging.getLogger(__name__)

_ENDINGS = {
    "length": "reached the limit of {max_tokens} tokens",
    "context": "the model's context is full",
    "cancelled": "stopped",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody else's reply comes first; ``ahead`` of them."""

    ahead: int


@dataclass(frozen=True, slots=True)
class Reading:
    """It is this reply's turn: the target reads the prompt."""

    prompt: Prompt


def fit(engine: SpeculativeEngine, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Prompt:
    """``messages`` as a prompt, the oldest left out where they and a fair reply do not fit the context together."""
    limit = engine.target.context_limit
    return encode(engine.tokenizer, messages, limit - min(max_tokens, limit // 4))


def decode(
    engine: SpeculativeEngine,
    conversation: Conversation | None,
    prompt: Prompt,
    settings: Settings,
    cancelled: Callable[[], bool],
    details: bool,
) -> Iterator[Step]:
    """The steps of a reply to ``prompt``; ``details`` for somebody who watches."""
    return engine.stream(prompt, conversation=conversation, cancelled=cancelled, details=details, **settings.arguments())


class Replies:
    """Writes replies into chats."""

    def __init__(self, engine: SpeculativeEngine) -> None:
        self.engine = engine
        self.turns = Turns()
        self.noted: Callable[[Chat, Settings, Stats], None] = lambda chat, settings, stats: None
        """Hears the figures of every reply."""

    def write(self, chat: Chat, writing: Writing, settings: Settings, details: bool) -> Generator[list[Step], None, None]:
        """Let the reply that `Chat.ask` began grow.

        Yields whenever it has changed, with the steps that changed it (none: it waits or reads). However this ends, by
        itself, by `Writing.stop`, by an error or because nobody listens any more, the reply stays in the chat and says so.
        """
        reply, stop = writing.reply, writing.stop
        messages = chat.prompt(settings.system_prompt)
        stats = Stats()
        token_ids: list[int] = []
        prompt: Prompt | None = None
        step: Step | None = None
        try:
            for events in self._events(chat, messages, settings, stop, details):
                steps = [event for event in events if isinstance(event, Step)]
                for event in events:
                    match event:
                        case Waiting(ahead):
                            reply.footer = f"waiting for {ahead} other {'reply' if ahead == 1 else 'replies'}"
                        case Reading():
                            prompt = event.prompt
                            reply.footer = f"reading {len(prompt.token_ids):,} tokens"
                            reply.notices = _trimmed(prompt)
                for step in steps:
                    stats.add(step)
                    token_ids += step.token_ids
                    reply.text += step.text
                    reply.footer = ""
                yield steps
            reply.state = "done" if step is not None and step.finish_reason not in (None, "cancelled") else "stopped"
            if step is not None and step.note and not stats.drafted:
                reply.notices.append(step.note)
        except Exception as error:
            reply.state = "failed"
            reply.notices.append(explain(error))
        finally:
            stop.set()
            self.noted(chat, settings, stats)
            if reply.state == "writing":
                reply.state = "stopped"
            reason = "cancelled" if step is None or step.finish_reason is None else step.finish_reason
            ending = "" if reply.state == "failed" else _ENDINGS.get(reason, "").format(max_tokens=settings.max_tokens)
            reply.footer = " · ".join(filter(None, [figures(stats, settings), ending]))
            if prompt is not None and token_ids and chat.writing is writing:
                chat.finished = Finished(prompt, tuple(token_ids), settings)

    def _events(
        self, chat: Chat, messages: list[dict[str, str]], settings: Settings, stop: threading.Event, details: bool
    ) -> Iterator[list[Waiting | Reading | Step]]:
        def produce(put: Callable[[Waiting | Reading | Step], None]) -> None:
            def work() -> None:
                prompt = fit(self.engine, messages, settings.max_tokens)
                put(Reading(prompt))
                chat.conversation = chat.conversation or self.engine.conversation()
                for step in decode(self.engine, chat.conversation, prompt, settings, stop.is_set, details):
                    put(step)

            with suppress(GaveUp):
                self.turns.run(work, stop.is_set, lambda ahead: put(Waiting(ahead)))

        return Pump(produce).batches()


def figures(stats: Stats, settings: Settings) -> str:
    """The figures of a reply, in one line."""
    if not stats.tokens:
        return ""
    parts = [f"{stats.tokens} tok", f"{stats.tokens_per_second:.0f} tok/s"]
    if settings.decoding != "plain":
        parts += [f"{stats.tokens_per_pass:.1f} tokens/pass", f"{stats.speedup:.1f}x plain"]
    return " · ".join(parts)


def explain(error: Exception) -> str:
    """One line about what went wrong; what is not the user's to put right goes to the log in full."""
    line = " ".join(str(error).split())[:300]
    if isinstance(error, PromptError | RequestError):
        return line[:1].upper() + line[1:]
    log.error("a reply failed", exc_info=error)
    return f"The engine failed ({type(error).__name__}: {line}). The chat goes on: try again, or change the settings."


def _trimmed(prompt: Prompt) -> list[str]:
    if not prompt.trimmed:
        return []
    what = "message was" if prompt.trimmed == 1 else f"{prompt.trimmed} messages were"
    return [f"context full: the oldest {what} left out"]
