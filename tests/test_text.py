"""Text streams in whole characters; stop strings are found however they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from toys import tiny_engine, tokenizer

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
