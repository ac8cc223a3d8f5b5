"""StaticPass: the verify pass in fixed shapes, on buffers of fixed address; on CUDA one replayed graph.

A GPU is idle while the host launches a thousand kernels one by one. A CUDA graph launches them all at once, but binds
shapes and addresses. So the texts are padded to a few batch sizes, their nodes to a few widths and the K/V to a few lengths,
everything a pass reads lies in device buffers that one transfer fills, and the K/V of the texts that are being decoded lies in
slots that belong to the graphs (`specdec.slots`). The same code runs eagerly, on any device, where nothing is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.cache import TreeCache, numbers
from specdec.cost import WIDTHS
from specdec.errors import first_line, is_out_of_memory
from specdec.slots import SEQUENCES, Slots
from specdec.transfer import staged
from specdec.tree import TokenTree

log = logging.getLogger(__name__)

BUCKETS = (*WIDTHS, WIDTHS[-1] + 1)
"""Nodes (root included) that a pass is padded to; the last fits the largest tree, 64 nodes and the root."""

_forget_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
"""Forgets the memory that cuBLAS computes in. Done before and after a capture, so that a graph has it in its own pool: others
may forget it at any time (torch's compiled graphs do), and the graph would still write there."""

Forward = Callable[[Tensor, Cache, Tensor, Tensor], Tensor]
"""Logits [B, W, V] of token ids [B, W] with a cache at positions [B, W] under an additive mask [B, 1, W, L]."""

Text = tuple[TreeCache, TokenTree]
"""A text's committed K/V, and the tree behind it that is to be verified."""


def bucket(nodes: int) -> int:
    """The width that a pass over ``nodes`` nodes is padded to."""
    return next(width for width in BUCKETS if width >= nodes)


class StaticPass:
    """Verifies trees of up to ``BUCKETS[-1]`` nodes; what `specdec.target.TargetModel.run` does in fixed shapes.

    The texts live in ``slots``. Row s of a pass is the text in slot s, so a pass covers the first slots up to the last one that
    it needs. With ``capture`` each (texts, width, length) becomes a CUDA graph at its first use, of which ``tell`` is told.
    """

    def __init__(
        self,
        forward: Forward,
        slots: Slots,
        vocab_size: int,
        dtype: torch.dtype,
        capture: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._forward, self.slots, self._dtype, self._capture, self._tell = forward, slots, dtype, capture, tell
        self._device = slots.blank.slabs[0].keys.device
        self._frames: dict[tuple[int, int], _Frame] = {}
        self._logits = torch.zeros(BUCKETS[-1], vocab_size, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if capture else None  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self.prepared = False
        """Whether the last pass was captured first."""
        self._bound = 0  # the capacity of the slots that the graphs know; another one, other buffers

    def drop_graphs(self) -> None:
        """Capture every pass anew: the graphs know weights that are no longer the model's."""
        self._graphs.clear()

    def verify(self, texts: Sequence[Text]) -> list[Tensor]:
        """The next-token logits after each node of each of ``texts``, [N, V] float32, valid until the next pass.

        One pass, or several where there are more texts than slots. Raises ValueError past a cache's maximum.
        """
        self.prepared = False
        width = bucket(max(len(tree) for _, tree in texts))
        self.slots.reserve(max(cache.length for cache, _ in texts) + width)
        most = len(self.slots)
        passes = [texts[start : start + most] for start in range(0, len(texts), most)]
        if len(passes) == 1:
            return self._verify(texts)
        return [rows.clone() for part in passes for rows in self._verify(part)]  # the next pass overwrites them

    def _verify(self, texts: Sequence[Text]) -> list[Tensor]:
        """`verify` in one pass."""
        width = bucket(max(len(tree) for _, tree in texts))
        places = self.slots.admit([cache for cache, _ in texts], width)
        for cache, tree in texts:
            cache.reserve(len(tree))  # there is room, unless the text would be longer than it may be
        count = next(count for count in SEQUENCES if count > max(places))
        frame = self._frame(count, width)
        frame.fill(dict(zip(places, texts, strict=True)), self.slots.capacity - 1)
        self._run(count, width, self.slots.blank.bucket(max(cache.length for cache, _ in texts) + width))
        return [frame.logits[place, : len(tree)] for place, (_, tree) in zip(places, texts, strict=True)]

    def _frame(self, count: int, width: int) -> _Frame:
        """What passes over ``count`` texts of ``width`` nodes read and write. They share one buffer of logits."""
        if (count, width) not in self._frames:
            if count * width > len(self._logits):  # graphs that know the smaller one keep it
                self._logits = self._logits.new_zeros(count * width, self._logits.shape[1])
            self._frames[count, width] = _Frame(count, width, self._logits)
        return self._frames[count, width]

    def _run(self, count: int, width: int, length: int) -> None:
        if not self._capture:
            self._pass(count, width, length)
            return
        if self._bound != self.slots.capacity:
            self._graphs.clear()
            self._bound = self.slots.capacity
        if (count, width, length) not in self._graphs:
            self.prepared = True
            texts = f"of {count} texts " if count > 1 else ""
            self._tell(f"capturing the target pass {texts}of width {width} over {length} positions")
            try:
                self._graphs[count, width, length] = self._captured(count, width, length)
            except RuntimeError as error:
                cause = error.__context__ or error  # what went wrong is told by the pass, then by the capture that ends with it
                if is_out_of_memory(cause):
                    raise cause from None
                log.warning("target passes run without CUDA graphs, slower: capturing one failed (%s)", first_line(cause))
                self._capture = False
                self._graphs.clear()
                self._pass(count, width, length)
                return
        self._graphs[count, width, length].replay()

    def _captured(self, count: int, width: int, length: int) -> torch.cuda.CUDAGraph:
        graph, stream, caller = torch.cuda.CUDAGraph(), self._stream, torch.cuda.current_stream(self._device)
        pool = next((other.pool() for other in self._graphs.values()), None)  # no pass needs what another one left there
        assert stream is not None
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):  # what libraries set up at their first call must not be captured
            self._pass(count, width, length)
        caller.wait_stream(stream)
        _forget_workspaces()
        try:
            # torch.cuda.graph leaves its stream only where the capture ends well; the context around it returns in any case
            with (
                torch.cuda.stream(caller),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._pass(count, width, length)
        finally:
            _forget_workspaces()
        return graph

    def _pass(self, count: int, width: int, length: int) -> None:
        """From the inputs of ``count`` texts of ``width`` nodes to their logits, over ``length`` positions.

        No shape or address depends on the texts.
        """
        frame = self._frames[count, width]
        prefix = frame.prefix[:, :, None]
        hidden = (torch.arange(length, device=self._device) >= prefix).repeat(1, width, 1)
        nodes = prefix + torch.arange(width, device=self._device)
        hidden.scatter_(2, nodes.expand(-1, width, -1), frame.hidden)
        mask = torch.zeros(count, 1, width, length, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden[:, None], torch.finfo(self._dtype).min)
        rows = torch.arange(count, device=self._device)[:, None]
        layers = range(len(self.slots.blank.places))
        cache = Cache(layers=[_Layer(*self.slots.layer(index, count), length, (rows, frame.targets)) for index in layers])
        frame.logits.copy_(self._forward(frame.token_ids, cache, frame.positions, mask))


class _Frame:
    """What a pass of ``count`` texts of ``width`` nodes reads, in one device buffer that one transfer fills; and its logits.

    ``token_ids``, ``positions`` and ``targets`` (where the K/V is written) [B, W], ``prefix`` [B, 1], the length of the
    committed prefix, and ``hidden`` [B, W, W], true where a node must not see another one. ``logits`` [B, W, V] float32 lie in
    ``buffer`` [at least B * W, V]. A text's rows of padding see the prefix and themselves, and are written behind the tree.
    """

    def __init__(self, count: int, width: int, buffer: Tensor) -> None:
        self._count, self._width, size = count, width, 8 * count * (3 * width + 1)
        self._inputs = torch.zeros(size + count * width * width, dtype=torch.uint8, device=buffer.device)
        integers = self._inputs[:size].view(torch.int64).view(count, -1)
        self.token_ids, self.positions, self.targets, self.prefix = integers.split_with_sizes([width, width, width, 1], dim=1)
        self.hidden = self._inputs[size:].view(torch.bool).view(count, width, width)
        self.logits = buffer[: count * width].view(count, width, -1)

    def fill(self, texts: Mapping[int, Text], trash: int) -> None:
        """Let them describe the trees of ``texts``, by row; other rows are written to position ``trash`` of their slots."""
        width = self._width
        integers = np.zeros((self._count, 3 * width + 1), np.int64)
        integers[:, 2 * width : 3 * width] = trash
        hidden = np.tile(~np.eye(width, dtype=np.bool_), (self._count, 1, 1))
        for row, (cache, tree) in texts.items():
            token_ids, positions, targets, prefix = np.split(integers[row], [width, 2 * width, 3 * width])
            token_ids[: len(tree)] = tree.token_ids
            positions[:] = prefix[:] = cache.length
            positions[: len(tree)] += tree.depths()
            targets[:] = cache.length + np.arange(width)
            hidden[row, : len(tree), : len(tree)] = ~tree.ancestor_mask()
        host = np.concatenate([integers.view(np.uint8).ravel(), hidden.view(np.uint8).ravel()])
        self._inputs.copy_(staged(host, self._inputs.device), non_blocking=True)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's K/V in the slots of a pass, read up to ``length``; new states go to ``targets``, slots and positions."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, length: int, targets: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.keys, self.values, self._length, self._targets = keys, values, length, targets

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slots, positions = self._targets
        self.keys[slots, :, positions] = numbers(key_states).transpose(1, 2)
        self.values[slots, :, positions] = numbers(value_states).transpose(1, 2)
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._length
