"""Text streams in whole characters; stop strings are found however they are cut."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from toys import tiny_engine, tokenizer
from transformers import PreTrainedTokenizerFast

from specdec.text import Detokenizer, SpecialText, StopStrings, token_texts

SAMPLE = "Grüße 👩\u200d👩\u200d👧 漢字かな🇩🇪 e\u0301 \t\n  end"


@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_no_character_comes_in_parts(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer(), [40, 41])
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def sentence_pieces(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Words that begin with a space, which the decoder takes from the first of them; bytes in pairs."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁Hello", "▁world", "ly", "!", "<0xC3>", "<0xA9>"]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


PARTS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
SENTENCE_PIECES = {
    "strip": sentence_pieces(decoders.Sequence([*PARTS, decoders.Strip(" ", 1, 0)])),
    "metaspace, always": sentence_pieces(decoders.Metaspace(prepend_scheme="always")),
    "metaspace, first": sentence_pieces(decoders.Metaspace(prepend_scheme="first")),
    "metaspace, never": sentence_pieces(decoders.Metaspace(prepend_scheme="never")),
    "word pieces": sentence_pieces(decoders.WordPiece()),
}
UNITS = st.lists(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9, 10)]), max_size=12)


@pytest.mark.parametrize("name", SENTENCE_PIECES)
@given(before=UNITS, reply=UNITS)
@example(before=[], reply=[(5,), (2,), (6,)])
@example(before=[(5,), (1,)], reply=[(6,)])
@example(before=[], reply=[(3,), (1,), (5,)])
def test_pieces_add_up_to_the_whole_decode_whatever_is_skipped_between(
    name: str, before: list[tuple[int, ...]], reply: list[tuple[int, ...]]
) -> None:
    own, context, token_ids = SENTENCE_PIECES[name], list(chain(*before)), list(chain(*reply))
    detokenizer = Detokenizer(own, context)
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    whole, known = (own.decode(ids, skip_special_tokens=True) for ids in (context + token_ids, context))
    assert known + "".join(pieces) + detokenizer.flush() == whole


def test_half_a_character_at_the_end_of_a_reply_is_shown_as_such() -> None:
    ids = tokenizer()("a👩")["input_ids"]
    detokenizer = Detokenizer(tokenizer(), [])
    text = "".join(detokenizer.add(i) for i in ids[:-1])
    assert text == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_do_not_show_in_the_text_but_by_name_in_the_tree() -> None:
    detokenizer = Detokenizer(tokenizer(), [])
    end = tokenizer().convert_tokens_to_ids("<|end|>")
    assert detokenizer.add(end) == ""
    assert token_texts(tokenizer(), [end]) == ["<|end|>"]


def test_a_special_token_tells_what_it_stands_for_and_text_that_looks_like_one_is_text() -> None:
    spelled = tokenizer().encode("<|end|>", split_special_tokens=True)
    assert len(spelled) == 7
    end, system, *letters = tiny_engine().token_texts([0, 1, *spelled])
    assert (end, end.meaning, system, system.meaning) == ("<|end|>", "end of reply", "<|system|>", "system")
    assert "".join(letters) == "<|end|>"
    assert not any(isinstance(letter, SpecialText) for letter in letters)


@given(st.text("ab<", max_size=30), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), st.data())
def test_the_first_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    found, position, matcher = None, 0, StopStrings(stops)
    while position < len(text) and found is None:
        piece = text[position : position + data.draw(st.integers(1, 5))]
        if (end := matcher.end(piece)) is not None:
            found = position + end
        position += len(piece)
    assert found == (min(ends) if ends else None)
