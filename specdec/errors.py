"""What goes wrong in a way that the user can put right."""

from __future__ import annotations

import torch


class LoadError(Exception):
    """A model that cannot be loaded, in one line for the user: what is wrong with what, and what to do about it."""


class PromptError(ValueError):
    """A prompt that cannot be used; the message names the culprit and the remedy."""


class MemoryFullError(RuntimeError):
    """A device without memory for the next pass of a reply, in one line; what was committed by then stays valid."""


class NotANumberError(RuntimeError):
    """A target pass that gave no numbers to choose by, in one line; the conversation is read anew by its next turn."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out; torch has a class for that on some devices and only words on others."""
    words = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's own words, short enough to stand in brackets inside another message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300].rstrip(".: ")
