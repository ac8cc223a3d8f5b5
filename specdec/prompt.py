"""Prompt: the tokens a reply continues, from plain text, chat messages or ready token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.errors import PromptError
from specdec.template import ChatTemplate, Message, Rendered, flattened
from specdec.tree import common_length

__all__ = ["Message", "Prompt", "PromptError", "encode", "fair_share"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``token_ids`` to continue; ``trimmed`` counts the oldest chat messages left out so that it fits the context.

    Of a chat also: ``ends``, the tokens that end a turn besides those of the model's generation config; ``opened``, the
    reasoning tag (such as ``<think>``) that the chat template has opened at the prompt's end, else empty (the reply to such
    a prompt has the closing tag only: whoever shows it puts ``opened`` in front); and ``common``, how many of the first tokens
    hold nothing private: those of the template and of the system prompt.
    """

    token_ids: tuple[int, ...]
    trimmed: int = 0
    common: int = 0
    ends: frozenset[int] = frozenset()
    opened: str = ""


def fair_share(max_new_tokens: int | None, context: int) -> int:
    """The tokens of a ``context`` that a chat leaves to its next reply: what it may have, at most a quarter."""
    return min(max_new_tokens or context, context // 4)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message] | Sequence[int] | Prompt,
    limit: int,
    reserve: int = 0,
) -> Prompt:
    """Tokenise ``prompt`` to at most ``limit`` tokens.

    Text and token ids must fit. A chat is trimmed until it leaves ``reserve`` of them to the reply: its oldest messages go
    first (a question together with its answer), the system prompt and the last message stay. Raises PromptError for what is
    empty, malformed or cannot be made to fit.
    """
    if isinstance(prompt, Prompt):
        encoded = prompt
    elif isinstance(prompt, str):
        _check_text(prompt)
        encoded = Prompt(tuple(tokenizer(prompt)["input_ids"]))
    elif isinstance(prompt, Sequence) and isinstance(next(iter(prompt), None), Mapping):
        encoded = _encode_chat(tokenizer, cast(Sequence[Message], prompt), limit - reserve)
    else:
        encoded = Prompt(_token_ids(prompt))
    if not encoded.token_ids:
        raise PromptError("the prompt is empty: there is no token to continue from")
    if len(encoded.token_ids) > limit:
        raise PromptError(
            f"the prompt has {len(encoded.token_ids)} tokens, but only {limit} fit the model's context; shorten it"
        )
    return encoded


def _token_ids(prompt: Any) -> tuple[int, ...]:
    """Of a list, or of anything else that has integers one after the other, such as an array."""
    try:
        return tuple(map(index, prompt))
    except TypeError as error:
        shown = " ".join(repr(prompt).split())[:80]
        raise PromptError(f"{shown} is no prompt: pass a text, a list of chat messages, or a list of token ids") from error


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise PromptError(f"the prompt holds half a character ({half!r}, a lone surrogate): leave it out") from error


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], room: int) -> Prompt:
    template = ChatTemplate(tokenizer)
    for message in messages:
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise PromptError(f'a chat message needs "role" and "content": {str(message)[:80]}')
    chat = [flattened(message) for message in messages]
    for text in (value for message in chat for value in message.values() if isinstance(value, str)):
        _check_text(text)
    system = chat[:1] if chat[0]["role"] == "system" else []
    rest = chat[len(system) :]

    def rendered(start: int) -> Rendered:
        return template.render(system + rest[start:])

    kept, trimmed = rendered(0), 0
    if len(kept.token_ids) > room and len(rest) > 1:
        starts = [*(i for i, message in enumerate(rest) if i > 0 and message["role"] == "user"), len(rest) - 1]
        fits = bisect_left(starts, True, hi=len(starts) - 1, key=lambda start: len(rendered(start).token_ids) <= room)
        kept, trimmed = rendered(starts[fits]), starts[fits]
    return Prompt(kept.token_ids, trimmed, _common(template, system, kept.token_ids), template.ends, kept.opened)


def _common(template: ChatTemplate, system: list[Message], token_ids: tuple[int, ...]) -> int:
    """How many of ``token_ids`` come before anything that the user says: what other questions to the same system begin with."""
    probes = [template.render([*system, {"role": "user", "content": letter}]).token_ids for letter in "ab"]
    return min(common_length(np.array(token_ids), np.array(probe)) for probe in probes)
