"""Text from outside, made inert: what looks like HTML or an image stays the text that it is.

The chat renders Markdown, and Markdown lets HTML through. A word joiner (U+2060, invisible) behind the first character
keeps a tag or an image from being one. In code nothing is a tag anyway, and code should stay as it is. The page's copy
button takes the joiners out again (``assets/page.js``).
"""

from __future__ import annotations

import re

_JOINER = "\N{WORD JOINER}"
_CODE = re.compile(
    r"(?ms)^[ \t]*(`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)"  # a fence, perhaps not closed yet
    r"|(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\2(?!`)"  # code within a paragraph
)
_ACTIVE = re.compile(r"<(?=[A-Za-z/!?|])|!(?=\[)")
_DISARMED = re.compile(f"([<!]){_JOINER}")


def inert(text: str) -> str:
    """``text`` as Markdown in which no HTML and no image is active."""
    parts: list[str] = []
    end = 0
    for code in _CODE.finditer(text):
        parts += [_ACTIVE.sub(_disarm, text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, _ACTIVE.sub(_disarm, text[end:])])


def original(text: str) -> str:
    """What `inert` was given."""
    return _DISARMED.sub(r"\1", text)


def _disarm(match: re.Match[str]) -> str:
    return match.group() + _JOINER
