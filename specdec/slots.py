"""Slots: the K/V of several texts in buffers of fixed address, which captured passes read and write.

A slot holds the K/V of one text, its tenant. Slots lie one behind the other, so that the first of them are the batch of a pass:
no pass copies K/V. A text moves in at its first pass and stays until its slot is needed by another text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.cache import Slab, TreeCache

SEQUENCES = (1, 2, 4, 8)
"""Texts that a pass is padded to, and numbers of slots that there may be."""
PADDING = 128
"""Positions that a cache must be able to hold beyond what is committed, for a pass and its padding."""
_PATIENCE = 4
"""Passes without a text after which its slot is given to another text that would make a smaller pass from there."""


@dataclass(slots=True, eq=False)
class _Slot:
    """``slabs``: its part of the buffers. ``end``: positions that its tenant has written. ``used``: its tenant's last pass."""

    slabs: list[Slab]
    end: int = 0
    used: int = 0
    reference: weakref.ref[TreeCache] | None = None

    @property
    def tenant(self) -> TreeCache | None:
        """The cache that lives here; None once it was cleared, grew elsewhere or is gone."""
        cache = None if self.reference is None else self.reference()
        lives_here = cache is not None and all(a is b for a, b in zip(cache.slabs, self.slabs, strict=True))
        return cache if lives_here else None

    def enter(self, cache: TreeCache, end: int) -> None:
        """Let ``cache`` live here with the first ``end`` positions of its K/V; the rest of the slot is zeroed."""
        for mine, theirs in zip(self.slabs, cache.slabs, strict=True):
            if end:
                mine.take(theirs, end)
            mine.forget(end)  # a pass reads all its positions, also those behind the prefix
        cache.slabs, self.reference, self.end = list(self.slabs), weakref.ref(cache), end

    def leave(self) -> None:
        """Give the tenant, if there is one, buffers of its own with all it wrote."""
        cache = self.tenant
        if cache is not None:
            cache.slabs = [slab.resized(max(self.end, cache.length + PADDING)) for slab in self.slabs]
        self.reference = None


class Slots:
    """Buffers for the K/V of up to ``SEQUENCES[-1]`` texts, all of one capacity, which doubles where a text needs more.

    ``blank``: an empty cache of the model. ``room()``: bytes that the buffers may take now. There are as many slots as fit, one
    in any case. Buffers that grow are new buffers: `capacity` tells them apart.
    """

    def __init__(self, blank: TreeCache, room: Callable[[], float]) -> None:
        self.blank, self._room = blank, room
        self.capacity = 0
        """Positions of each slot. A text never needs the last one: rows of a pass that belong to no text are written there."""
        self._slabs: list[Slab] = []
        self._slots: list[_Slot] = []
        self._passes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def reserve_all(self) -> None:
        """Take at once the largest buffers in which every slot has room."""
        capacity, end = 0, self.blank.max_length + self.blank.padding
        while capacity < end and SEQUENCES[-1] * self.blank.size(larger := self.blank.bucket(capacity + 1)) <= self._room():
            capacity = larger
        if capacity:
            self._grow(capacity)

    def reserve(self, end: int) -> None:
        """Make room for ``end`` positions in each slot."""
        if end >= self.capacity:
            self._grow(self.blank.bucket(end + 1))

    def admit(self, caches: Sequence[TreeCache], nodes: int) -> list[int]:
        """Let all ``caches``, at most as many as there are slots, live here for a pass over ``nodes`` each: their slots.

        A text that is new takes a free slot, or that of the text that was used least recently, which moves out.
        """
        self.reserve(max(cache.length for cache in caches) + nodes)
        self._passes += 1
        tenants = [slot.tenant for slot in self._slots]
        for slot, tenant in zip(self._slots, tenants, strict=True):
            if any(tenant is cache for cache in caches):
                slot.used = self._passes
        for cache in caches:
            if not any(tenant is cache for tenant in tenants):
                self._move(cache, self._slots, patience=0)
        fewest = next(count for count in SEQUENCES if count >= len(caches))
        for slot in self._slots[fewest:]:
            if slot.used == self._passes and (tenant := slot.tenant) is not None:
                self._move(tenant, self._slots[:fewest], _PATIENCE)
        places = [next(place for place, slot in enumerate(self._slots) if slot.tenant is cache) for cache in caches]
        for place, cache in zip(places, caches, strict=True):
            self._slots[place].end = cache.length + nodes
        return places

    def layer(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values [count, heads, capacity, head dim] of a layer in the first ``count`` slots."""
        kind, row = self.blank.places[index]
        layers = self.blank.slabs[kind].keys.shape[0]
        keys, values = (buffer[row::layers][:count] for buffer in self._slabs[kind])
        return keys, values

    def _move(self, cache: TreeCache, slots: Sequence[_Slot], patience: int) -> None:
        """Move ``cache`` into one of ``slots``: a free one, or else the least recently used, if idle for over ``patience``."""
        free = [slot for slot in slots if slot.tenant is None]
        idle = [slot for slot in slots if self._passes - slot.used > patience]
        if free or idle:
            slot = free[0] if free else min(idle, key=lambda slot: slot.used)
            slot.leave()
            slot.enter(cache, cache.length)
            slot.used = self._passes

    def _grow(self, capacity: int) -> None:
        """Exchange the buffers for others of ``capacity`` positions; tenants move along, or out where there are fewer slots."""
        size = self.blank.size(capacity)
        count = next(count for count in reversed(SEQUENCES) if count == 1 or count * size <= self._room())
        for slot in self._slots[count:]:
            slot.leave()
        slabs = [slab.blank(capacity, count) for slab in self.blank.slabs]
        old, self._slabs, self.capacity = self._slots, slabs, capacity
        self._slots = [_Slot([_part(slab, index, count) for slab in slabs]) for index in range(count)]
        for slot, before in zip(self._slots, old, strict=False):
            if (tenant := before.tenant) is not None:
                slot.enter(tenant, min(before.end, before.slabs[0].capacity))
                slot.used = before.used


def _part(slab: Slab, index: int, count: int) -> Slab:
    """The part of slot ``index`` of ``count`` in ``slab``."""
    layers = slab.keys.shape[0] // count
    keys, values = (buffer[index * layers : (index + 1) * layers] for buffer in slab)
    return Slab(keys, values)
