"""Writing: all texts of one answer, from their turns in the line to the last piece. Waiting takes no thread."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt
from specdec.request import Request
from specdec.serving.choice import Choice, Piece
from specdec.serving.line import Line
from specdec.serving.openai import ApiError, Json, Question, usage
from specdec.serving.service import Service
from specdec.stats import Stats
from specdec.step import Step


class Pending:
    """Counts the replies of each caller that wait or are written. Used by one event loop, so it has no lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._replies: Counter[Hashable] = Counter()

    @contextmanager
    def counted(self, caller: Hashable, replies: int) -> Iterator[None]:
        """Count so many ``replies`` of ``caller``. Raises ApiError where that would be too many."""
        if replies > self._most:
            raise ApiError(f"a request may ask for at most {self._most} texts, and this one asks for {replies}", param="n")
        if self._replies[caller] + replies > self._most:
            message = f"{self._replies[caller]} of your replies wait or are being written; the limit is {self._most}"
            raise ApiError(f"{message}: try again when some have ended", 429, code="rate_limit_exceeded")
        self._replies[caller] += replies
        try:
            yield
        finally:
            self._replies[caller] -= replies
            if not self._replies[caller]:
                del self._replies[caller]


class Writing:
    """The texts that ``question`` asks ``engine`` for, each a reply with its own place in the ``line``.

    There are n for each prompt, one after the other, with consecutive seeds. Those of one ``caller`` start from each other's
    K/V.
    """

    def __init__(
        self,
        service: Service,
        line: Line,
        pending: Pending,
        caller: Hashable,
        engine: SpeculativeEngine,
        question: Question,
    ) -> None:
        self.engine, self.question = engine, question
        self._service, self._line, self._pending, self._caller = service, line, pending, caller
        self._arguments = question.arguments(engine.model.generation_config)
        self._seed = secrets.randbits(31) if question.seed is None else question.seed
        self._requests: list[Request] = []
        self._reused: list[int] = []
        self._stats = Stats()
        self._heard: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()

    @property
    def count(self) -> int:
        """How many texts there are."""
        return len(self.question.prompts) * self.question.n

    @property
    def usage(self) -> Json:
        """Of all texts. Tokens of a prompt are cached if none of its texts had to read them."""
        read = sum(len(request.prompt.token_ids) for request in self._requests)
        each = self.question.n
        cached = sum(min(self._reused[start : start + each]) for start in range(0, len(self._reused), each))
        return usage(read, cached, self._stats)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all texts as they come, each with the index of its text.

        Raises what ended one of them, and RequestError, PromptError, ClosedError and ApiError before the first.
        """
        with self._pending.counted(self._caller, self.count):
            self._requests = await asyncio.to_thread(self._checked)
            choices = [Choice(self.engine, request) for request in self._requests for _ in range(self.question.n)]
            self._reused = [0] * len(choices)
            tasks = [asyncio.create_task(self._write(index)) for index in range(len(choices))]
            try:
                running = len(choices)
                while running:
                    index, item = await self._heard.get()
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        self._stats.add(item)
                        yield index, choices[index].add(item)
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _checked(self) -> list[Request]:
        """What the engine is asked for, a request for each prompt: nobody waits in line for an error."""
        requests = [self.engine.request(prompt, None, **self._arguments) for prompt in self.question.prompts]
        if any(request.prompt.trimmed for request in requests):
            limit = self.engine.target.context_limit
            message = f"messages and answer do not fit the model's context of {limit} tokens: send fewer or shorter messages"
            raise ApiError(message, param=self.question.asks, code="context_length_exceeded")
        return requests

    async def _write(self, index: int) -> None:
        """Wait for a turn, and have it until the text has ended or nobody wants it any more."""
        place = self._line.enter(self._caller)
        try:
            await asyncio.shield(asyncio.wrap_future(place.granted))
            if self._service.engine is not self.engine:
                raise ApiError("the model was exchanged while the request waited: send it again", 503)
            prompt, number = divmod(index, self.question.n)
            self._reused[index] = await self._reply(index, self._requests[prompt].prompt, self._seed + number)
        except Exception as error:
            self._heard.put_nowait((index, error))
        finally:
            self._line.leave(place)

    async def _reply(self, index: int, prompt: Prompt, seed: int) -> int:
        """One text, whose steps are heard; how many tokens of its prompt were cached. Cancelled, it ends within a round."""
        loop, ended, unwanted = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hear(item: Step | Exception | None) -> None:
            self._heard.put_nowait((index, item))
            if not isinstance(item, Step):
                ended.set()

        def deliver(item: Step | Exception | None) -> None:
            with suppress(RuntimeError):  # the loop is closed, for the server has ended: nobody hears it
                loop.call_soon_threadsafe(hear, item)

        own: dict[str, Any] = {"seed": seed, "cancelled": unwanted.is_set, "owner": ("api", self._caller)}
        try:
            reply = await asyncio.to_thread(self._service.begin, prompt, deliver, None, **own, **self._arguments)
            await ended.wait()
            return reply.sequence.reused
        finally:
            unwanted.set()
