"""From tokens to text: whole characters as they complete, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 16  # tokens; a longer run without a complete character is invalid text, shown as it is


class Detokenizer:
    """Incremental decoding of one reply.

    A token's text depends on its neighbours (byte-fallback tokens, leading spaces), so each piece is the difference of two
    decodes that share the same few tokens of left context. What that context begins with may lose its leading space, so it
    always has a text of its own: special tokens, which are skipped, would leave the loss to the word after them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_MAX_PENDING:])
        self._context = 0
        self._done = len(self._ids)

    def add(self, token_id: int) -> str:
        """The characters that ``token_id`` completes; empty while one is still in parts."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        pending = len(self._ids) - self._done
        if after.endswith(_REPLACEMENT) and pending < _MAX_PENDING:
            return ""
        if len(after) > len(before):
            self._context = self._done
        self._done = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left over at the end of a reply: the parts of a character that never completed."""
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        self._context = self._done = len(self._ids)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class StopStrings:
    """Finds the first of several stop strings in a growing text, however it is cut into pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._longest = max(map(len, self._strings), default=0)
        self._seen = ""  # the last characters, enough to complete any stop string

    def end(self, piece: str) -> int | None:
        """Feed ``piece``; if a stop string completes in it, how many characters of it belong to the text, else None.

        Like in transformers' generate, the stop string itself is part of the text.
        """
        if not self._strings:
            return None
        offset = len(self._seen)
        self._seen += piece
        ends = [i + len(s) for s in self._strings if (i := self._seen.find(s)) >= 0 and i + len(s) > offset]
        self._seen = self._seen[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(ends) - offset if ends else None


class SpecialText(str):
    """The name of a special token, which is no text but a sign; ``meaning``: what it stands for, for a reader."""

    meaning: str


def special_texts(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> dict[int, SpecialText]:
    """Every special token of ``tokenizer``; those of ``ends`` end a reply."""
    texts: dict[int, SpecialText] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            texts[token_id] = SpecialText(token.content)
            name = token.content.strip("<|>[]") or token.content
            texts[token_id].meaning = "end of reply" if token_id in ends else name
    return texts


def token_texts(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], special: Mapping[int, SpecialText] = MappingProxyType({})
) -> list[str]:
    """Each token's own text, for display: those in ``special`` by name, a leading space kept, half a character as U+FFFD."""
    backend = tokenizer.convert_ids_to_tokens(list(token_ids))
    texts: list[str] = []
    for token_id, token in zip(token_ids, backend, strict=True):
        text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if token is not None and token.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" "):
            text = " " + text  # SentencePiece drops the space that begins a text
        texts.append(special.get(token_id, text))
    return texts
