"""Text from outside, made harmless for a chat that renders Markdown.

What a model writes is Markdown, and Markdown lets HTML through, except in code. Only the renderer knows what is code, so every
tag, image and diagram is made inert: a word joiner (U+2060, invisible) keeps it from being one. A joiner also hides the word
cpp from Gradio's highlighter, which does not know C and would drop the whole message.

What a user types is shown as it was typed: every character that could have a meaning becomes a character reference.

The page gives the text itself to whoever copies or edits a message (``assets/page.js``).
"""

from __future__ import annotations

import re

_JOINER = "\N{WORD JOINER}"
_MEANINGFUL = re.compile(r"[!-/:-@\[-`{-~ \t\n\r\u2060\u2063]")
_REFERENCE = re.compile(r"&#0(\d{4});")
"""As nobody else writes one: five digits, of which the first is 0."""
_ACTIVE = re.compile(rf"<(?=[A-Za-z/!?|{_JOINER}])|!(?=[\[{_JOINER}])|(?:```|~~~)[ \t]*(?=mermaid|cpp|{_JOINER})")
_DISARMED = re.compile(rf"(<|!|(?:```|~~~)[ \t]*){_JOINER}")


def safe_markdown(text: str) -> str:
    """``text`` as Markdown in which no HTML, no image and no diagram is active."""
    return _ACTIVE.sub(rf"\g<0>{_JOINER}", text)


def as_typed(text: str) -> str:
    """``text`` as Markdown that shows exactly these characters."""
    return _MEANINGFUL.sub(lambda match: f"&#{ord(match[0]):05};", text)


def original(text: str) -> str:
    """What `safe_markdown` or `as_typed` was given."""
    if not _MEANINGFUL.search(_REFERENCE.sub("", text)):
        return _REFERENCE.sub(lambda match: chr(int(match[1])), text)
    return _DISARMED.sub(r"\1", text)
