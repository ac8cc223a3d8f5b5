"""TreeCache: the K/V of one conversation, preallocated.

Layout of each layer: ``[committed prefix | scratch]``. A pass writes its nodes into the scratch region right behind the
committed prefix and attends over both. `commit` keeps the accepted path by moving its rows (only those not in place
already) to the front of the scratch region; `rewind` forgets a tail. Neither touches the prefix, so a step's cost does not
grow with the context.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.attention import Pack
from specdec.transfer import to_device

BLOCK = 512
"""Positions that the buffers begin with; from there they double."""
STRIDE = 64
"""A tree's pass attends over a multiple of so many positions, where there is room for them."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Where a layer keeps its K/V, and how: (heads, head dim) of its keys and of its values."""

    device: torch.device
    dtype: torch.dtype
    keys: tuple[int, int]
    values: tuple[int, int]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerShape:
        """The shape of a layer whose states are ``keys`` and ``values`` [1, heads, T, head dim]."""
        return cls(keys.device, keys.dtype, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))


class Slab(NamedTuple):
    """The K/V of all layers of one shape: ``keys`` and ``values`` [layers, K/V heads, capacity, head dim].

    All of it are numbers, also what was never written: a mask hides by a sum and a product with 0, which only numbers heed.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: LayerShape, layers: int) -> Slab:
        """Room for nothing yet."""
        return cls(
            *(
                torch.zeros(layers, heads, 0, dim, dtype=shape.dtype, device=shape.device)
                for heads, dim in (shape.keys, shape.values)
            )
        )

    @property
    def capacity(self) -> int:
        """Positions allocated per layer."""
        return self.keys.shape[2]

    def blank(self, capacity: int, copies: int = 1) -> Slab:
        """Zeros of this shape with room for ``capacity`` positions, and for ``copies`` times as many layers."""
        return Slab(*(b.new_zeros(copies * b.shape[0], b.shape[1], capacity, b.shape[3]) for b in self))

    def resized(self, capacity: int) -> Slab:
        """A copy with room for ``capacity`` positions."""
        copy = self.blank(capacity)
        copy.take(self, min(capacity, self.capacity))
        return copy

    def take(self, other: Slab, length: int) -> None:
        """Begin with the first ``length`` positions of ``other``."""
        for mine, theirs in zip(self, other, strict=True):
            mine[:, :, :length] = theirs[:, :, :length]

    def forget(self, length: int) -> None:
        """Zero everything from ``length`` on."""
        for buffer in self:
            buffer[:, :, length:].zero_()


def numbers(states: Tensor) -> Tensor:
    """``states`` as a `Slab` may hold them.

    A draft that goes beyond float16's 65,504 must not reach the nodes it is hidden from. bfloat16 and float32 end at 3e38,
    where no sound model gets: they are not looked at, for that takes two more kernels a layer.
    """
    return torch.nan_to_num(states, 0.0, 0.0, 0.0) if states.dtype == torch.float16 else states


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's face towards transformers; the buffers and the length live in the TreeCache."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # no cycle: a conversation that ends gives its memory back at once
        self.index = index

    @property
    def cache(self) -> TreeCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the TreeCache allocates all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.max_length


class LayerViews(NamedTuple):
    """A layer's scratch for new nodes [1, heads, N, dim], and what they attend over [1, heads, L, dim]."""

    new_keys: Tensor
    new_values: Tensor
    keys: Tensor
    values: Tensor


class TreeCache(Cache):  # type: ignore[misc]
    """K/V of ``length`` committed positions in every layer, with scratch behind them; never more than ``max_length``.

    ``shapes``: one per layer. ``slabs`` hold the layers of one shape each (so the layers of one device together), and are
    allocated at the first write; ``places`` tells slab and row of each layer. A pass of fixed width may write up to
    ``padding`` positions beyond ``max_length``, of which nothing is kept.
    """

    def __init__(self, shapes: Sequence[LayerShape], max_length: int, padding: int = 0) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(len(shapes))])
        kinds = list(dict.fromkeys(shapes))
        self.places = [(kinds.index(shape), shapes[:index].count(shape)) for index, shape in enumerate(shapes)]
        self.slabs = [Slab.empty(kind, shapes.count(kind)) for kind in kinds]
        self.max_length, self.padding = max_length, padding
        self.length = 0
        self._extent = 0

    def bucket(self, end: int) -> int:
        """The capacity that ``end`` positions ask for: `BLOCK` times a power of two, or all there may ever be."""
        capacity = BLOCK
        while capacity < end:
            capacity *= 2
        return capacity if capacity < self.max_length else self.max_length + self.padding

    def size(self, capacity: int) -> int:
        """Bytes that buffers for ``capacity`` positions take."""
        each = (buffer.shape[0] * buffer.shape[1] * buffer.shape[3] * buffer.itemsize for slab in self.slabs for buffer in slab)
        return capacity * sum(each)

    def reserve(self, nodes: int, padding: int = 0) -> None:
        """Make room for ``nodes`` positions behind the committed ones, and for ``padding`` behind those.

        Raises ValueError past ``max_length``. Where memory runs out, what is cached stays valid.
        """
        end = self.length + nodes
        if end > self.max_length:
            raise ValueError(f"{end} positions do not fit the cache's maximum of {self.max_length}")
        for index, slab in enumerate(self.slabs):
            if end + padding > slab.capacity:
                self.slabs[index] = slab.resized(self.bucket(end + padding))

    @contextmanager
    def extended(self, nodes: int) -> Iterator[int]:
        """Let a pass over ``nodes`` attend over more positions than there are, up to a multiple of `STRIDE`: how many.

        So the shapes of its products come again. Its mask must hide what is behind the nodes; that is numbers, see `Slab`.
        """
        end = self.length + nodes
        extent = max(end, min(-(-end // STRIDE) * STRIDE, self.max_length))
        self.reserve(nodes, extent - end)
        self._extent = extent
        try:
            yield extent
        finally:
            self._extent = 0

    def write(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write new states [1, heads, T, dim] into the scratch of ``layer``; views of what the pass attends over.

        Raises ValueError past ``max_length``.
        """
        self.reserve(key_states.shape[2])
        end = self.length + key_states.shape[2]
        index, row = self.places[layer]
        keys, values = self.slabs[index]
        keys[row, :, self.length : end] = numbers(key_states[0])
        values[row, :, self.length : end] = numbers(value_states[0])
        seen = max(end, self._extent)
        return keys[row : row + 1, :, :seen], values[row : row + 1, :, :seen]

    def views(self, nodes: int, extent: int) -> list[LayerViews]:
        """Of each layer, for a pass over ``nodes`` that attends over ``extent`` positions, all of them within the buffers."""
        end = self.length + nodes
        slabs = []
        for slab in self.slabs:
            layers = [buffer[:, None] for buffer in slab]  # [layers, 1, heads, capacity, dim]
            parts = [*(b[..., self.length : end, :] for b in layers), *(b[..., :extent, :] for b in layers)]
            slabs.append([LayerViews(*views) for views in zip(*(part.unbind() for part in parts), strict=True)])
        return [slabs[index][row] for index, row in self.places]

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the scratch rows ``path`` (nodes of the last pass, ascending, root first) as committed positions."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            place = slice(self.length + moved, self.length + len(path))
            for slab in self.slabs:
                rows = to_device(np.asarray(path[moved:], np.int64) + self.length, slab.keys.device)
                for buffer in slab:
                    buffer[:, :, place] = buffer[:, :, rows]  # indexing by a tensor copies first: overlap is safe
        self.length += len(path)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for slab in self.slabs for buffer in slab)

    def copy(self, other: TreeCache, length: int) -> None:
        """Hold what ``other``, a cache of the same model, holds of its first ``length`` positions, and nothing else."""
        self.length = 0
        self.reserve(length)
        for mine, theirs in zip(self.slabs, other.slabs, strict=True):
            mine.take(theirs, length)
        self.length = length

    def clear(self) -> None:
        """Forget all, and give back the memory."""
        self.slabs = [slab.resized(0) for slab in self.slabs]
        self.length = 0

    def rewind(self, length: int) -> None:
        """Forget every committed position from ``length`` on. Raises ValueError if there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind to {length}: {self.length} positions are committed")
        self.length = length


class PackedCache(Cache):  # type: ignore[misc]
    """The caches of several texts as transformers' cache of one pass over all of them (`specdec.attention.Pack`).

    ``extents``: how many positions each text attends over, its own nodes included.
    """

    def __init__(self, caches: Sequence[TreeCache], extents: Sequence[int], pack: Pack) -> None:
        views = [cache.views(size, extent) for cache, size, extent in zip(caches, pack.sizes, extents, strict=True)]
        super().__init__(layers=[_PackedLayer(pack, layer) for layer in zip(*views, strict=True)])


class _PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PackedCache`: every text's nodes are written into its own cache."""

    is_sliding = False

    def __init__(self, pack: Pack, texts: Sequence[LayerViews]) -> None:
        super().__init__()
        self._pack = pack
        self._scratch = [*(text.new_keys for text in texts), *(text.new_values for text in texts)]
        self._seen = [(text.keys, text.values) for text in texts]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: each cache allocates its own."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        parts = [
            part for states in (key_states, value_states) for part in numbers(states).split_with_sizes(self._pack.sizes, dim=2)
        ]
        torch._foreach_copy_(self._scratch, parts)
        self._pack.views = self._seen
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
