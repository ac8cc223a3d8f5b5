"""Text from outside is inert, wherever in Markdown it stands, and comes back unchanged."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui.markdown import as_typed, original, safe_markdown

ACTIVE = re.compile(r"<[A-Za-z/!?|]|!\[|```mermaid")
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</svg><script>x</script>",
    "![a](http://x/y.png)",
    "<|im_end|>",
    "<!-- a -->",
    "a <b c",
    "<![CDATA[x]]>",
    "```mermaid\ngraph TD; A-->B\n```",
]
AROUND = [
    "{}",
    "`{}`",
    "```\n{}\n```",
    "\\`{}`",
    "``` a`b\n{}",
    "    ```\n{}",
    "# a `\n{} `",
    "- ```\n  a\n\n{}",
    "{}\u2060",
    "\\({}\\)",
]
PIECES = [
    "<",
    "!",
    "[",
    "`",
    "```",
    "~~~",
    "\u2060",
    "mermaid",
    "cpp",
    "a",
    "/",
    "?",
    "|",
    " ",
    "\n",
    "\\",
    "(",
    ")",
    "]",
    "$$",
]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_disarmed_in_code_as_elsewhere_and_comes_back_unchanged(text: str, around: str) -> None:
    text = around.format(text)
    assert not ACTIVE.search(safe_markdown(text))
    assert original(safe_markdown(text)) == text


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_whatever_the_text_nothing_in_it_is_active_and_the_original_comes_back(text: str) -> None:
    assert not ACTIVE.search(safe_markdown(text))
    assert original(safe_markdown(text)) == text


@given(st.lists(st.sampled_from([*PIECES, "&", "&#42;", "*", "_", "#", "\u2063", "é"])).map("".join))
def test_nothing_that_was_typed_has_a_meaning_in_markdown_and_the_original_comes_back(text: str) -> None:
    assert re.fullmatch(r"(?:\w|&#0\d{4};)*", as_typed(text))
    assert "_" not in as_typed(text)
    assert original(as_typed(text)) == text
