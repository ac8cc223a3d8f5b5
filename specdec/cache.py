"""TreeCache: the K/V of one conversation, preallocated.

Layout of each layer: ``[committed prefix | scratch]``. A pass writes its nodes into the scratch region right behind the
committed prefix and attends over both. `commit` keeps the accepted path by moving its rows (only those not in place
already) to the front of the scratch region; `rewind` forgets a tail. Neither touches the prefix, so a step's cost does not
grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 512
"""Positions by which the buffers grow."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's face towards transformers; the buffers and the length live in the TreeCache."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

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


class TreeCache(Cache):  # type: ignore[misc]
    """K/V of ``length`` committed positions in every layer, with scratch behind them; never more than ``max_length``.

    ``keys`` and ``values`` are [layers, K/V heads, capacity, head dim], allocated at the first write.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.num_layers, self.max_length = num_layers, max_length
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Positions allocated per layer."""
        return 0 if self.keys is None else self.keys.shape[2]

    def write(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write new states [1, heads, T, dim] into the scratch of ``layer``; views of prefix + scratch.

        Raises ValueError past ``max_length`` or where layers differ in shape.
        """
        end = self.length + key_states.shape[2]
        if self.keys is None or self.values is None or end > self.capacity:
            self.keys = self._grown(self.keys, key_states, end)
            self.values = self._grown(self.values, value_states, end)
        if key_states.shape[1::2] != self.keys.shape[1::2] or value_states.shape[1::2] != self.values.shape[1::2]:
            raise ValueError(f"layer {layer} has another K/V shape than layer 0; TreeCache needs them alike")
        self.keys[layer, :, self.length : end] = key_states[0]
        self.values[layer, :, self.length : end] = value_states[0]
        return self.keys[layer : layer + 1, :, :end], self.values[layer : layer + 1, :, :end]

    def _grown(self, buffer: Tensor | None, states: Tensor, end: int) -> Tensor:
        if end > self.max_length:
            raise ValueError(f"{end} positions do not fit the cache's maximum of {self.max_length}")
        capacity = min(-(-end // BLOCK) * BLOCK, self.max_length)
        grown = states.new_empty(self.num_layers, states.shape[1], capacity, states.shape[3])
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the scratch rows ``path`` (nodes of the last pass, ascending, root first) as committed positions."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path) and self.keys is not None and self.values is not None:
            rows = torch.tensor(path[moved:], device=self.keys.device) + self.length
            place = slice(self.length + moved, self.length + len(path))
            for buffer in (self.keys, self.values):
                buffer[:, :, place] = buffer[:, :, rows]  # indexing by a tensor copies first: overlap is safe
        self.length += len(path)

    def rewind(self, length: int) -> None:
        """Forget every committed position from ``length`` on. Raises ValueError if there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind to {length}: {self.length} positions are committed")
        self.length = length
