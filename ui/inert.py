"""Text from outside, made inert: what looks like HTML, an image or a diagram stays the text that it is.

The chat renders Markdown, and Markdown lets HTML through, save in code. But what is code only the renderer knows, so none is
spared: a word joiner (U+2060, invisible) keeps each tag, image and diagram from being one. The page takes the joiners out of
what is copied (``assets/page.js``).

A joiner also hides the word cpp from Gradio's highlighter, which fails for want of C, and takes the whole message along.
"""

from __future__ import annotations

import re

_JOINER = "\N{WORD JOINER}"
_ACTIVE = re.compile(rf"<(?=[A-Za-z/!?|{_JOINER}])|!(?=[\[{_JOINER}])|(?:```|~~~)[ \t]*(?=mermaid|cpp|{_JOINER})")
_DISARMED = re.compile(rf"(<|!|(?:```|~~~)[ \t]*){_JOINER}")


def inert(text: str) -> str:
    """``text`` as Markdown in which no HTML, no image and no diagram is active."""
    return _ACTIVE.sub(rf"\g<0>{_JOINER}", text)


def original(text: str) -> str:
    """What `inert` was given."""
    return _DISARMED.sub(r"\1", text)
