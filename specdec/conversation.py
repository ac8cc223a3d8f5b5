"""Conversation: what outlives a reply, the K/V of a text and its speculator; and who may start from whose K/V."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from specdec.cache import TreeCache
from specdec.devices import free_bytes
from specdec.speculators import Speculator
from specdec.target import TargetModel
from specdec.tree import common_length

LEAST_SHARED = 16
"""Tokens from which a prefix that somebody else has is worth a copy, or worth waiting for while they read it."""
MOST_KEPT = 64
"""Texts that are kept after their replies: each new one is compared with all of them."""
SHARE_OF_MEMORY = 0.25
"""Of the memory that is free at the start, what texts may keep after their replies."""


class ConversationBusyError(RuntimeError):
    """Two replies were asked of one conversation at the same time."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Text:
    """Committed tokens and their K/V. ``token_ids`` are the tokens whose K/V ``cache`` holds.

    ``owner``: texts of one owner may start from each other's K/V, None: from nobody's. ``common``: the first tokens, which any
    owner may start from. ``busy``: a reply is being written behind it. ``edition``: of the weights that computed the K/V.
    """

    target: TargetModel
    cache: TreeCache = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    owner: Hashable = None
    common: int = 0
    busy: bool = False
    edition: int = field(init=False)

    def __post_init__(self) -> None:
        self.cache, self.edition = self.target.new_cache(), self.target.edition()

    def rewind(self, token_ids: Sequence[int]) -> int:
        """Keep the longest cached prefix of ``token_ids`` and forget the rest; how many tokens stay cached."""
        edition = self.target.edition()
        if self.edition != edition:
            self.edition = edition
            self.forget()
        shared = common_length(np.array(self.token_ids, np.int64), np.array(token_ids, np.int64))
        self.cache.rewind(shared)
        del self.token_ids[shared:]
        return shared

    def forget(self) -> None:
        """Give up the K/V, to be read again by the next turn."""
        self.cache.clear()
        self.token_ids.clear()


class Conversation:
    """All mutable state of one chat with a target: its `Text` and its speculator.

    After a stopped or failed reply the text holds what was committed by then, so the next turn continues as from a fresh
    start. So it does after the model's weights were changed, unless they were written to through ``weight.data`` or a numpy
    view, which nobody sees.
    """

    def __init__(self, target: TargetModel, speculator: Speculator) -> None:
        self.target, self.speculator = target, speculator
        self.text = Text(target)

    @property
    def cache(self) -> TreeCache:
        """The K/V of the committed tokens."""
        return self.text.cache

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose K/V is cached."""
        return self.text.token_ids

    def forget(self) -> None:
        """As `Text.forget`."""
        self.text.forget()


class Prefixes:
    """The texts whose K/V is there, so that whoever begins with the same tokens need not read them again.

    A text that begins with another's tokens gets a copy of their K/V. Copied, not shared: a text's K/V stays in one piece,
    which attention reads fastest, and a copy costs next to nothing beside reading (1,000 tokens of the default model on one
    core: 15 ms against 3.1 s). What ended replies hold stays within a part of the memory that was free at the start, least
    recently used first out; the latest always stays.
    """

    def __init__(self, target: TargetModel) -> None:
        self.limit = SHARE_OF_MEMORY * free_bytes(target.device)
        self._texts: WeakSet[Text] = WeakSet()
        self._kept: OrderedDict[Text, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of K/V that all texts hold."""
        return sum(text.cache.nbytes for text in self._texts)

    def begin(self, text: Text, token_ids: Sequence[int]) -> int:
        """Let ``text`` hold as much of ``token_ids`` as it, or any text it may start from, has cached: how many tokens."""
        self._texts.add(text)
        own = text.rewind(token_ids)
        wanted = np.array(token_ids, np.int64)
        lengths = {
            other: self._shared(text, other, wanted)
            for other in self._texts
            if other is not text and other.edition == text.edition
        }
        best = max(lengths, key=lengths.__getitem__, default=text)
        if lengths.get(best, 0) < own + LEAST_SHARED:
            return own
        text.cache.copy(best.cache, lengths[best])
        text.token_ids[:] = token_ids[: lengths[best]]
        if best in self._kept:
            self._kept.move_to_end(best)
        return lengths[best]

    def keep(self, text: Text) -> None:
        """A reply behind ``text`` has ended: it stays if it has an owner, as long as there is room."""
        self._kept.pop(text, None)
        if text.owner is not None and text.token_ids:
            self._kept[text] = None
        while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self.nbytes > self.limit):
            oldest = next(iter(self._kept))
            self._kept.pop(oldest)
            if not oldest.busy:
                oldest.forget()

    def forget(self, *, owner: Hashable = None) -> None:
        """Let the texts of ``owner`` that have ended go."""
        for text in [text for text in self._kept if text.owner == owner]:
            self._kept.pop(text)
            if not text.busy:
                text.forget()

    def cool(self) -> bool:
        """Give up the K/V of every text behind which no reply is written; whether there was any."""
        idle = [text for text in self._texts if not text.busy and text.cache.nbytes]
        for text in idle:
            text.forget()
        self._kept.clear()
        return bool(idle)

    @staticmethod
    def _shared(text: Text, other: Text, wanted: NDArray[np.int64]) -> int:
        """How many tokens of ``wanted`` are cached by ``other`` and may be copied from it to ``text``."""
        shared = common_length(np.array(other.token_ids[: len(wanted)], np.int64), wanted)
        mine = text.owner is not None and text.owner == other.owner
        return shared if mine else min(shared, text.common, other.common)
