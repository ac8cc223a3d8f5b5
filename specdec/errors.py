"""What goes wrong in a way that the user can put right."""

from __future__ import annotations


class LoadError(Exception):
    """A model that cannot be loaded, in one line for the user: what is wrong with what, and what to do about it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's own words, short enough to stand in brackets inside another message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300].rstrip(".: ")
