"""The OpenAI API: what its requests may hold, and the shapes of its answers and errors.

A request field is either honoured or refused by name. Ignored are only those that ask for nothing: a null, a tag for the
caller's own use, or the value that switches a feature off.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import GenerationConfig

from specdec.serving.choice import Piece, Token
from specdec.stats import Stats

Json = dict[str, Any]
Q = TypeVar("Q", bound="Question")

GREEDY = 1e-5
"""A temperature below this asks for the most probable token: dividing by it could overflow."""
_IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    )
)
_OFF: Json = {
    "best_of": 1,
    "echo": False,
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}
"""Fields that are not supported, and the values that ask for nothing."""
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An answer that is an error: one line, the HTTP ``status``, and the request field (``param``) that is to blame."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> Json:
        """The error as the API writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _whole(text: str) -> str:
    """``text``, if it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half a character (a lone surrogate): leave it out") from error
    return text


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """The text of ``content``: a text, or a list of parts that are texts."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('only text is supported: a string, or parts of the form {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """One prompt or several, each a text or token ids: always as a list of prompts."""
    several = [value] if isinstance(value, str) or (isinstance(value, list) and _are_token_ids(value)) else value
    if not (isinstance(several, list) and all(isinstance(one, str) or _are_token_ids(one) for one in several)):
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
    return several


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class Shape(BaseModel):
    """Part of a request. Types are strict, and fields that it does not know are refused; null means not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_what_asks(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


class StreamOptions(Shape):
    """What a stream holds besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(Shape):
    """A text that the answer will probably be much like."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_text), AfterValidator(_whole)]


class Message(Shape):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    annotations: Annotated[list[Any], Field(max_length=0)] = []


class Question(Shape):
    """What both kinds of completions have in common."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    asks: ClassVar[str]
    """The field that holds the prompt."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_texts), Field(max_length=16)] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    prediction: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_off(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {
            name: value for name, value in fields.items() if name not in _IGNORED and not (name in _OFF and value == _OFF[name])
        }

    def check(self) -> None:
        """Raise ApiError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is only of use with stream=true", param="stream_options")

    @property
    def prompts(self) -> list[Any]:
        """Each as `specdec.engine.SpeculativeEngine.stream` takes it."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of each text; None: as many as the context has room for."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the most probable tokens are shown in each place; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def arguments(self, defaults: GenerationConfig) -> Json:
        """As arguments of `specdec.engine.SpeculativeEngine.stream`, all but the seed.

        What is not given comes from ``defaults``, the model's own; where they say nothing the temperature is 1.
        """
        temperature = defaults.temperature if self.temperature is None else self.temperature
        temperature = 1.0 if temperature is None else temperature
        arguments: Json = {
            "do_sample": temperature >= GREEDY,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.most_tokens,
            "stop_strings": self.stop or None,
            "logprobs": self.alternatives,
            "prediction": None if self.prediction is None else self.prediction.content,
        }
        if temperature >= GREEDY:
            top_k = defaults.top_k if self.top_k is None else self.top_k
            arguments |= {"temperature": temperature, "top_k": max(top_k or 0, 0), "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in arguments.items() if value is not None}

    def choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        """One of the texts of an answer."""
        raise NotImplementedError

    def openings(self, count: int) -> list[Json]:
        """What a stream of ``count`` texts begins with."""
        return []

    def delta(self, index: int, piece: Piece) -> Json:
        """What comes next of a text."""
        raise NotImplementedError


class ChatQuestion(Question):
    """The body of ``POST /v1/chat/completions``."""

    kind, chunk_kind, prefix, asks = "chat.completion", "chat.completion.chunk", "chatcmpl-", "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def check(self) -> None:
        """As `Question.check`."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ: pass one of them", param="max_tokens")

    @property
    def prompts(self) -> list[Any]:
        """One chat."""
        roles = {"developer": "system"}
        return [[{"role": roles.get(one.role, one.role), "content": one.content} for one in self.messages]]

    @property
    def most_tokens(self) -> int | None:
        """As `Question.most_tokens`, under its newer name or its older one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As `Question.alternatives`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        """A message."""
        text = "".join(piece.text for piece in pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs([token for piece in pieces for token in piece.tokens]),
            "finish_reason": pieces[-1].finish_reason,
        }

    def openings(self, count: int) -> list[Json]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(count)]

    def delta(self, index: int, piece: Piece) -> Json:
        """A part of a message."""
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self.alternatives is None:
            return None
        content = [
            {**_token(token.text, token.logprob), "top_logprobs": [_token(*other) for other in token.top]} for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionQuestion(Question):
    """The body of ``POST /v1/completions``."""

    kind, chunk_kind, prefix, asks = "text_completion", "text_completion", "cmpl-", "prompt"

    prompt: Annotated[list[Any], BeforeValidator(_prompts), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[Any]:
        """Texts and lists of token ids."""
        return self.prompt

    @property
    def alternatives(self) -> int | None:
        """As `Question.alternatives`."""
        return self.logprobs

    def choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        """A text."""
        tokens = [token for piece in pieces for token in piece.tokens]
        return self.delta(index, Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason))

    def delta(self, index: int, piece: Piece) -> Json:
        """A part of a text."""
        logprobs = self._logprobs(piece.tokens)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self.logprobs is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def read(kind: type[Q], body: bytes) -> Q:
    """The request in ``body``. Raises ApiError, which names the field that is wrong or not supported."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError("the body of the request is not valid JSON") from error
    if not isinstance(fields, dict):
        raise ApiError("the body of the request must be a JSON object")
    try:
        question = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(f"{param} is not supported here: leave it out", param=param) from error
        raise ApiError(f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param) from error
    question.check()
    return question


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _token(text: str, logprob: float) -> Json:
    whole = "\N{REPLACEMENT CHARACTER}" not in text  # half a character has no text of its own, and its bytes are not known
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def usage(prompt_tokens: int, cached_tokens: int, stats: Stats) -> Json:
    """Of all texts of an answer; draft tokens are counted as those of a prediction."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


class Answer:
    """The envelopes of one answer to ``question`` by ``model``."""

    def __init__(self, question: Question, model: str) -> None:
        self.question = question
        self._common = {"id": question.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[Sequence[Piece]], used: Json) -> Json:
        """All texts at once."""
        choices = [self.question.choice(index, pieces) for index, pieces in enumerate(texts)]
        return {**self._common, "object": self.question.kind, "choices": choices, "usage": used}

    def chunk(self, *choices: Json, used: Json | None = None) -> Json:
        """One event of a stream."""
        chunk = {**self._common, "object": self.question.chunk_kind, "choices": list(choices)}
        return {**chunk, "usage": used} if self.question.include_usage else chunk


def models(name: str, created: int) -> Json:
    """The list of the one model that is served."""
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> Json:
    """One entry of `models`."""
    return {"id": name, "object": "model", "created": created, "owned_by": "specdec"}
