"""StaticPass: the verify pass in fixed shapes, on buffers of fixed address; on CUDA one replayed graph.

A GPU is idle while the host launches a thousand kernels one by one. A CUDA graph launches them all at once, but binds
shapes and addresses. So the nodes are padded to a few widths and the K/V to a few lengths, everything a pass reads lies in
device buffers that one transfer fills, and the K/V of the conversation that is being decoded lies in buffers that belong to
the graphs. The same code runs eagerly, on any device, where nothing is captured.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.cache import TreeCache, numbers
from specdec.cost import WIDTHS
from specdec.errors import first_line, is_out_of_memory
from specdec.transfer import staged
from specdec.tree import TokenTree

log = logging.getLogger(__name__)

BUCKETS = (*WIDTHS, WIDTHS[-1] + 1)
"""Nodes (root included) that a pass is padded to; the last fits the largest tree, 64 nodes and the root."""
PADDING = 128
"""Positions that a cache must be able to hold beyond what is committed, for a pass and its padding."""

_forget_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
"""Forgets the memory that cuBLAS computes in. Done before and after a capture, so that a graph has it in its own pool: others
may forget it at any time (torch's compiled graphs do), and the graph would still write there."""

Forward = Callable[[Tensor, Cache, Tensor, Tensor], Tensor]
"""Logits [1, W, V] of token ids [1, W] with a cache at positions [1, W] under an additive mask [1, 1, W, L]."""


def bucket(nodes: int) -> int:
    """The width that a pass over ``nodes`` nodes is padded to."""
    return next(width for width in BUCKETS if width >= nodes)


class StaticPass:
    """Verifies trees of up to ``BUCKETS[-1]`` nodes; what `specdec.target.TargetModel.verify` does in fixed shapes.

    ``home`` is an empty cache whose buffers the passes work on. One conversation's cache lives there at a time, until the
    next one moves in (a copy each; none while a reply is decoded). With ``capture`` each (width, length) becomes a CUDA graph
    at its first use, of which ``tell`` is told.
    """

    def __init__(
        self,
        forward: Forward,
        home: TreeCache,
        vocab_size: int,
        dtype: torch.dtype,
        capture: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._forward, self._home, self._dtype, self._capture, self._tell = forward, home, dtype, capture, tell
        self._device = home.slabs[0].keys.device
        self._tenant: Callable[[], TreeCache | None] = lambda: None
        self._inputs = {width: _Inputs(width, self._device) for width in BUCKETS}
        self._logits = torch.zeros(BUCKETS[-1], vocab_size, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if capture else None  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.prepared = False
        """Whether the last pass was captured first."""
        self._bound: list[int] = []  # the capacities of the buffers that the graphs know; another one, another buffer

    def drop_graphs(self) -> None:
        """Capture every pass anew: the graphs know weights that are no longer the model's."""
        self._graphs.clear()

    def admit(self, cache: TreeCache) -> None:
        """Let ``cache`` live in the buffers of the passes. Who lives there moves out, with all it wrote."""
        if cache.slabs is self._home.slabs:
            return
        tenant = self._tenant()
        if tenant is not None and tenant.slabs is self._home.slabs:  # else it was cleared
            tenant.slabs = [slab.resized(tenant.length + PADDING) for slab in self._home.slabs]
            self._tenant = lambda: None
        if cache.slabs[0].capacity:
            self._home.length = cache.length
            self._home.reserve(0, PADDING)
            for mine, theirs in zip(self._home.slabs, cache.slabs, strict=True):
                mine.take(theirs, min(mine.capacity, theirs.capacity))
        for slab in self._home.slabs:
            slab.forget(cache.length)  # a pass reads its whole bucket, also what lies behind the prefix
        cache.slabs = self._home.slabs
        self._tenant = weakref.ref(cache)

    def verify(self, cache: TreeCache, tree: TokenTree) -> Tensor:
        """The next-token logits after each node, [N, V] float32: a view of a buffer that the next pass overwrites.

        Raises ValueError past the cache's maximum.
        """
        width = bucket(len(tree))
        self.admit(cache)
        cache.reserve(len(tree), padding=width - len(tree))
        self._inputs[width].fill(tree, cache.length)
        self._run(width, cache.bucket(cache.length + width))
        return self._logits[: len(tree)]

    def _run(self, width: int, length: int) -> None:
        self.prepared = False
        if not self._capture:
            self._pass(width, length)
            return
        capacities = [slab.capacity for slab in self._home.slabs]
        if capacities != self._bound:
            self._graphs.clear()
            self._bound = capacities
        if (width, length) not in self._graphs:
            self.prepared = True
            self._tell(f"capturing the target pass of width {width} over {length} positions")
            try:
                self._graphs[width, length] = self._captured(width, length)
            except RuntimeError as error:
                cause = error.__context__ or error  # what went wrong is told by the pass, then by the capture that ends with it
                if is_out_of_memory(cause):
                    raise cause from None
                log.warning("target passes run without CUDA graphs, slower: capturing one failed (%s)", first_line(cause))
                self._capture = False
                self._graphs.clear()
                self._pass(width, length)
                return
        self._graphs[width, length].replay()

    def _captured(self, width: int, length: int) -> torch.cuda.CUDAGraph:
        graph, stream, caller = torch.cuda.CUDAGraph(), self._stream, torch.cuda.current_stream(self._device)
        pool = next((other.pool() for other in self._graphs.values()), None)  # no pass needs what another one left there
        assert stream is not None
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):  # what libraries set up at their first call must not be captured
            self._pass(width, length)
        caller.wait_stream(stream)
        _forget_workspaces()
        try:
            # torch.cuda.graph leaves its stream only where the capture ends well; the context around it returns in any case
            with (
                torch.cuda.stream(caller),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._pass(width, length)
        finally:
            _forget_workspaces()
        return graph

    def _pass(self, width: int, length: int) -> None:
        """From the inputs of ``width`` to the logits, over ``length`` positions: no shape or address depends on the text."""
        inputs = self._inputs[width]
        hidden = (torch.arange(length, device=self._device) >= inputs.prefix).repeat(width, 1)
        hidden.index_copy_(1, inputs.slots, inputs.hidden)
        mask = torch.zeros(width, length, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        layers = []
        for index, row in self._home.places:
            keys, values = self._home.slabs[index]
            layers.append(_Layer(keys[row : row + 1, :, :length], values[row : row + 1, :, :length], inputs.slots))
        logits = self._forward(inputs.token_ids[None], Cache(layers=layers), inputs.positions[None], mask[None, None])
        self._logits[:width].copy_(logits[0])


class _Inputs:
    """What a pass of one width reads, in one device buffer that one transfer fills.

    ``token_ids``, ``positions`` and ``slots`` (where the K/V is written) [W], ``prefix`` [1], the length of the committed
    prefix, and ``hidden`` [W, W], true where a node must not see another one. Rows of padding see the prefix and themselves,
    and are written behind the tree.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, numbers = width, 8 * (3 * width + 1)
        self._buffer = torch.zeros(numbers + width * width, dtype=torch.uint8, device=device)
        sizes = [width, width, width, 1]
        self.token_ids, self.positions, self.slots, self.prefix = torch.split(self._buffer[:numbers].view(torch.int64), sizes)
        self.hidden = self._buffer[numbers:].view(torch.bool).view(width, width)

    def fill(self, tree: TokenTree, length: int) -> None:
        """Let them describe ``tree`` behind ``length`` committed positions."""
        width, size = self._width, len(tree)
        numbers = np.zeros(3 * width + 1, np.int64)
        numbers[:size] = tree.token_ids
        numbers[width:] = length
        numbers[width : width + size] += tree.depths()
        numbers[2 * width : 3 * width] += np.arange(width)
        hidden = ~np.eye(width, dtype=np.bool_)
        hidden[:size, :size] = ~tree.ancestor_mask()
        host = np.concatenate([numbers.view(np.uint8), hidden.view(np.uint8).ravel()])
        self._buffer.copy_(staged(host, self._buffer.device), non_blocking=True)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's K/V over the length of a pass; new states go where ``slots`` says."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys[0].index_copy_(1, self.slots, numbers(key_states[0]))
        self.values[0].index_copy_(1, self.slots, numbers(value_states[0]))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def get_max_length(self) -> int:
        return self.keys.shape[2]
