"""The OpenAI-compatible HTTP API: routes to mount beside a page, or to serve alone.

A handler waits without a thread: for its turn in the line that all replies share, and for the steps that the device's thread
hands over. A client that disconnects ends its replies before their next round.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import aclosing

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.engine import SpeculativeEngine
from specdec.errors import MemoryFullError, NotANumberError
from specdec.prompt import PromptError
from specdec.request import RequestError
from specdec.serving.choice import Piece
from specdec.serving.line import Line
from specdec.serving.openai import Answer, ApiError, ChatQuestion, CompletionQuestion, Json, Question, model, models, read
from specdec.serving.service import ClosedError, Service
from specdec.serving.writing import Pending, Writing

log = logging.getLogger(__name__)

PENDING = 64
"""The most replies of one caller that wait or are written at once."""
_KEY_HOLDER = "key"
"""The caller who has the API key."""
_EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Api:
    """The API of what ``service`` runs; replies wait in ``line``.

    With an ``api_key`` whoever calls must show it (``Authorization: Bearer KEY``). A caller is told apart by the key, else by
    the network address, and has at most ``pending`` replies that wait or are written.
    """

    def __init__(self, service: Service, line: Line, *, api_key: str | None = None, pending: int = PENDING) -> None:
        self._service, self._line = service, line
        self._api_key = api_key
        self._pending = Pending(pending)
        self._created = int(time.time())

    def router(self) -> APIRouter:
        """The routes: ``/health`` and everything below ``/v1/``."""
        router = APIRouter(include_in_schema=False)
        router.add_api_route("/health", self._health, methods=["GET"])
        router.add_api_route("/v1/models", self._models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])
        router.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        router.add_api_route("/v1/completions", self._completions, methods=["POST"])
        router.add_api_route("/v1/{rest:path}", self._nothing, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        return router

    def app(self) -> FastAPI:
        """An application that serves the API and nothing else."""
        return FastAPI(routes=list(self.router().routes), openapi_url=None)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(ChatQuestion, request)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(CompletionQuestion, request)

    async def _answer(self, kind: type[Question], request: Request) -> Response:
        try:
            caller = self._caller(request)
            question = read(kind, await request.body())
            engine = self._engine(question.model)
        except ApiError as error:
            return refusal(error)
        except ClientDisconnect:  # before the request was complete: nobody is there to be answered
            return Response()
        return Completion(Writing(self._service, self._line, self._pending, caller, engine, question))

    async def _models(self, request: Request) -> Response:
        return self._about(request, "")

    async def _model(self, request: Request, name: str) -> Response:
        return self._about(request, name)

    def _about(self, request: Request, name: str) -> Response:
        try:
            self._caller(request)
            served = self._engine(name).name
        except ApiError as error:
            return refusal(error)
        return JSONResponse((model if name else models)(served, self._created))

    async def _health(self) -> Response:
        try:
            self._engine("")
        except ApiError as error:
            return refusal(error)
        return JSONResponse({"status": "ok"})

    async def _nothing(self, request: Request) -> Response:
        return refusal(ApiError(f"{request.method} {request.url.path} is not part of this API", 404, code="unknown_url"))

    def _engine(self, name: str) -> SpeculativeEngine:
        """The engine that serves the model of this ``name``, "" for any. Raises ApiError."""
        try:
            engine = self._service.engine
        except ClosedError as error:
            raise ApiError(str(error), 503) from error
        if name not in ("", engine.name):
            raise ApiError(f"the model {name!r} is not served here, but {engine.name}", 404, "model", "model_not_found")
        return engine

    def _caller(self, request: Request) -> Hashable:
        """Who calls. Raises ApiError where a key is needed and was not shown."""
        if self._api_key is None:
            return request.client.host if request.client else ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode()):
            message = "this server needs its API key: send it as Authorization: Bearer KEY"
            raise ApiError(message, 401, code="invalid_api_key")
        return _KEY_HOLDER


class Completion(Response):
    """The answer to one ``question``, written while it is sent. It ends where the client disconnects."""

    def __init__(self, writing: Writing) -> None:
        super().__init__()
        self._writing, self._question = writing, writing.question
        self._answer = Answer(writing.question, writing.engine.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client disconnects before."""
        work = asyncio.create_task((self._stream if self._question.stream else self._send_whole)(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: defaultdict[int, list[Piece]] = defaultdict(list)
        try:
            async with aclosing(self._writing.pieces()) as pieces:
                async for index, piece in pieces:
                    texts[index].append(piece)
        except Exception as error:
            response = refusal(_told(error, self._question))
        else:
            whole = self._answer.whole([texts[index] for index in range(len(texts))], self._writing.usage)
            response = JSONResponse(whole)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events. What fails before the first of them has an HTTP status, what fails later is one of them."""
        begun = False
        try:
            async with aclosing(self._writing.pieces()) as pieces:
                async for index, piece in pieces:
                    deltas = list(self._deltas(index, piece))
                    if not begun:
                        begun = True
                        await _begin(send)
                        deltas = [*self._question.openings(self._writing.count), *deltas]
                    if deltas:
                        await _send(send, *map(self._answer.chunk, deltas))
        except Exception as error:
            told = _told(error, self._question)
            if begun:
                await _send(send, told.body, last=True)
            else:
                await refusal(told)(scope, receive, send)
            return
        used = [self._answer.chunk(used=self._writing.usage)] if self._question.include_usage else []
        await _send(send, *used, "[DONE]", last=True)

    def _deltas(self, index: int, piece: Piece) -> Iterator[Json]:
        """What is told of ``piece``, and then that the text has ended, if it has."""
        if piece.text or piece.tokens:
            yield self._question.delta(index, Piece(piece.text, piece.tokens))
        if piece.finish_reason is not None:
            yield self._question.delta(index, Piece("", (), piece.finish_reason))


def refusal(error: ApiError) -> JSONResponse:
    """An error as a response."""
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(error.status)
    return JSONResponse(error.body, error.status, headers)


def _told(error: Exception, question: Question) -> ApiError:
    """What a client is told of an error."""
    match error:
        case ApiError():
            return error
        case PromptError():
            return ApiError(str(error), param=question.asks)
        case RequestError():
            return ApiError(str(error))
        case ClosedError() | MemoryFullError():
            return ApiError(str(error), 503)
        case NotANumberError():
            return ApiError(str(error), 500)
    log.error("a reply failed", exc_info=error)
    return ApiError("the reply failed inside the server: its log tells why", 500)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in _EVENT_STREAM.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send(send: Send, *events: Json | str, last: bool = False) -> None:
    """Server-sent events, in one part of the body."""
    lines = (event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events)
    body = "".join(f"data: {line}\n\n" for line in lines)
    await send({"type": "http.response.body", "body": body.encode(), "more_body": not last})
