"""ChatTemplate: from chat messages to the text and the tokens of a prompt, by the tokenizer's own template.

Templates differ in what they take: some have no system role, some demand that roles alternate, some loop over the parts of a
message where others add up texts. What a template takes is found out by rendering short messages with it, never guessed from
its name, and messages are brought into that form.

What always holds: what a user said is in the prompt, and it stays text even where it is spelled like a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _CONTROL_TOKEN_END, _CONTROL_TOKEN_START, mark_control_tokens

from specdec.errors import PromptError

Message = Mapping[str, Any]
"""A chat message: ``role`` (system, user, assistant) and ``content``, a text or a list of ``{"type": "text", "text": ...}``."""

_SYSTEM, _QUESTION, _REPLY, _NEXT = "SYSTEM-5e1f", "QUESTION-5e1f", "REPLY-5e1f", "NEXT-5e1f"
"""What the messages say that a template is tried with."""
_GAP = "\n\n"
"""Between the texts of two messages that become one."""
_MERGED = ("system", "user", "assistant")
"""Roles of which several messages in a row may become one; results of tools, say, each answer a call of their own."""
_OPENED = re.compile(r"(<think>|<thinking>|<reasoning>|\[THINK\])\s*\Z")
_LONGEST_OPENED = 40
_MARKS = str.maketrans("", "", _CONTROL_TOKEN_START + _CONTROL_TOKEN_END)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's ``token_ids``; ``opened``: the reasoning tag that the template leaves open at its end, else empty."""

    token_ids: tuple[int, ...]
    opened: str


@dataclass(frozen=True, slots=True)
class _Form:
    """What the template ``source`` takes: messages in parts, a system message, two messages of one role in a row.

    ``ends`` are the tokens that end a reply. ``control`` matches what in a message is spelled like a control token;
    ``special`` the same in a reply, where a tag such as ``<think>`` is the model's own token.
    """

    source: str
    parts: bool
    system: bool
    neighbours: bool
    ends: frozenset[int]
    control: re.Pattern[str]
    special: re.Pattern[str]


_FORMS: WeakKeyDictionary[PreTrainedTokenizerBase, _Form] = WeakKeyDictionary()


class ChatTemplate:
    """The chat template of ``tokenizer``. Raises PromptError where it has none, or several and no default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._name = tokenizer, tokenizer.name_or_path or "the tokenizer"
        if tokenizer.chat_template is None:
            raise PromptError(
                f"{self._name} has no chat template: it is not a chat model. Use an instruct model, or pass plain text."
            )
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            names = ", ".join(sorted(tokenizer.chat_template))
            raise PromptError(
                f"{self._name} has several chat templates ({names}) and no default: set tokenizer.chat_template to one of them."
            ) from error
        form = _FORMS.get(tokenizer)
        if form is None or form.source != source:
            form = _FORMS[tokenizer] = self._tried(source)
        self._form = form

    @property
    def ends(self) -> frozenset[int]:
        """The tokenizer's end token, and the token that the template writes behind a reply."""
        return self._form.ends

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The prompt for a reply to ``messages``. Raises PromptError where the template refuses them or leaves one out."""
        form = self._form
        text = self._text([_marked(message, form) for message in self._adapted(messages)])
        plain = text.translate(_MARKS)
        for message in messages:
            said = message["content"]
            if message["role"] == "user" and isinstance(said, str) and said.translate(_MARKS).strip() not in plain:
                shown = " ".join(said.split())[:40]
                raise PromptError(f"the chat template of {self._name} leaves out what the user said ({shown}): choose another")
        try:
            token_ids = self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"]
        except ValueError as error:
            raise PromptError(f"{self._name} cannot keep a control token in a message as text: {error}") from error
        opened = _OPENED.search(plain[-_LONGEST_OPENED:])
        return Rendered(tuple(token_ids), opened[0] if opened else "")

    def text(self, messages: Sequence[Message]) -> str:
        """``messages`` as the template writes them, with the beginning of a reply. Raises PromptError where it refuses them."""
        return self._text(self._adapted(messages))

    def _adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """``messages`` as the template takes them."""
        form, adapted = self._form, [dict(message) for message in messages]
        if not form.system and adapted[0]["role"] == "system":
            adapted[0]["role"] = "user"
            if len(adapted) > 1 and adapted[1]["role"] == "user":
                adapted[:2] = [_merged(adapted[:2])]
        if not form.neighbours:
            runs = [(role, list(run)) for role, run in groupby(adapted, lambda message: message["role"])]
            adapted = [one for role, run in runs for one in ([_merged(run)] if role in _MERGED else run)]
        if form.parts:
            for message in adapted:
                if isinstance(message["content"], str):
                    message["content"] = _in_parts(message["content"])
        return adapted

    def _text(self, messages: Sequence[Message]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError) as error:  # the latter from a template that adds texts to what is none
            raise PromptError(f"the chat template of {self._name} refuses these messages: {error}") from error

    def _tried(self, source: str) -> _Form:
        """What the template shows of the messages it is tried with."""

        def shows(*turns: tuple[str, str], parts: bool) -> bool:
            try:
                text = self._text([{"role": role, "content": _in_parts(said) if parts else said} for role, said in turns])
            except PromptError:
                return False
            return all(said in text for _, said in turns)

        question = ("user", _QUESTION)
        parts = not shows(question, parts=False) and shows(question, parts=True)
        added = self._tokenizer.added_tokens_decoder.values()
        return _Form(
            source=source,
            parts=parts,
            system=shows(("system", _SYSTEM), question, parts=parts),
            neighbours=shows(question, ("user", _NEXT), parts=parts),
            ends=frozenset({self._tokenizer.eos_token_id, self._turn_end(parts)} - {None}),
            control=_any_of(self._tokenizer._get_control_tokens(source)),
            special=_any_of(token.content for token in added if token.special),
        )

    def _turn_end(self, parts: bool) -> int | None:
        """The control token that the template writes behind a reply, if what it writes before one is what a reply begins with.

        Where it is not, a reply is made of several messages, and what ends one of them does not end the reply.
        """
        turns = (("user", _QUESTION), ("assistant", _REPLY), ("user", _NEXT))
        try:
            text = self._text([{"role": role, "content": _in_parts(said) if parts else said} for role, said in turns])
        except PromptError:
            return None
        _, _, rest = text.partition(_QUESTION)
        before, _, rest = rest.partition(_REPLY)
        behind, _, last = rest.partition(_NEXT)
        if not last.startswith(before):
            return None
        ends = {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        found = _any_of(ends).match(behind.lstrip())
        return ends[found[0]] if found else None


def flattened(message: Message) -> dict[str, Any]:
    """``message`` with a list of text parts joined to one text. Raises PromptError for parts of another type."""
    content = message["content"]
    if not isinstance(content, list | tuple):
        return dict(message)
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f'a message part of type {kind!r} cannot be read: pass parts of type "text" only')
    return {**message, "content": "".join(part["text"] for part in content)}


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _merged(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Messages of one role as one; those without a text are left out."""
    texts = [message["content"] for message in messages if isinstance(message["content"], str) and message["content"]]
    return {**messages[0], "content": _GAP.join(texts)} if len(messages) > 1 else messages[0]


def _marked(message: dict[str, Any], form: _Form) -> Any:
    """``message`` with marks around what is spelled like a control token."""
    return mark_control_tokens(message, form.special if message["role"] == "assistant" else form.control)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of ``tokens``, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
