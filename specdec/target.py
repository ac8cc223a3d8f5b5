"""TargetModel: the only caller of a Hugging Face forward.

Tree attention needs no forked model: transformers passes a ready-made 4-D attention mask and explicit position ids through
untouched, so one ordinary forward verifies a whole token tree.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache, get_layer_types_and_kwargs

from specdec.attention import folded
from specdec.cache import LayerShape, TreeCache
from specdec.cost import WIDTHS, PassCost
from specdec.devices import free_bytes, give_back_memory, gpu_is_lent
from specdec.errors import MemoryFullError, first_line, is_out_of_memory
from specdec.logits import argmax, top_tokens
from specdec.packing import PackedWeights
from specdec.speculators import TopK
from specdec.static import BUCKETS, PADDING, StaticPass, bucket
from specdec.transfer import synchronize, to_device
from specdec.tree import TokenTree
from specdec.weights import states

PREFILL_CHUNK = 512
"""Prompt tokens per prefill pass: bounds memory and the wait for a cancellation."""
_HOME = 0.25
"""Share of the free device memory that the cache of captured passes may take from the beginning."""
_SPREAD = 7919
"""A prime that takes small numbers all over the vocabulary, for its first tokens are special and answered chaotically."""
_TOO_FAR = 0.15
"""Share of its size by which a node's logits differ if its mask is ignored; bfloat16's rounding was seen to make 0.06."""
_SHARED = 0.005
"""The same share where one text's logits change with another text beside it; in float32 it was 0, and from 0.012 on if so."""

_REMEDY = "Use a model whose layers all have full attention, such as Llama, Qwen2/3, OLMo 2 or GPT-2."


class UnsupportedModelError(Exception):
    """A model that cannot verify a token tree; the message names what stands in the way, and the remedy."""


class Cancelled(Exception):
    """Raised by `TargetModel.prefill` between two chunks when the caller asked to stop."""


class TargetModel:
    """A causal language model seen as: prefill a prompt, verify a tree, at a measured cost.

    ``static``: whether trees are verified in fixed shapes (see `specdec.static`) and all choices drawn at once on the device;
    by default so on a CUDA device that holds the whole model, except where it comes and goes (ZeroGPU). ``progress``, which may
    be exchanged later on, is told of what takes longer than a pass, with the share done where that is known.

    Raises UnsupportedModelError at construction if the model cannot take a tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        static: bool | None = None,
        progress: Callable[[str, float | None], None] = lambda *_: None,
    ) -> None:
        self.model, self.progress = model, progress
        self.name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context_limit = _context_limit(config)
        _require_full_attention(model, self.context_limit)
        self._packed = PackedWeights(model)
        self._shapes = self._layer_shapes()
        cuda = self.device.type == "cuda"
        if static is None:
            static = _is_static(self.device, self._shapes)
        self.draws_at_once: bool = static or cuda
        """Whether the device works while the host goes on, so that a step should wait for it once."""
        self._weights, self._edition = states(model), 0
        self._static: StaticPass | None = None
        if static:
            home = self._home(cuda)
            self._static = StaticPass(
                self._forward, home, self.vocab_size, model.dtype, cuda, lambda text: self.progress(text, None)
            )
        try:
            self._require_independent_rows()
            self._require_tree_attention()
        except (TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                f"{self.name} cannot verify a token tree: its attention takes no 4-D mask ({first_line(error)}). {_REMEDY}"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return torch.device(self.model.device)

    def new_cache(self) -> TreeCache:
        """An empty cache of this model's shape."""
        return TreeCache(self._shapes, self.context_limit, padding=PADDING)

    @property
    def prepared(self) -> bool:
        """Whether the last pass was prepared first (see `specdec.static`), so that its time says nothing of the next ones."""
        return self._static is not None and self._static.prepared

    def edition(self) -> int:
        """Another number once a weight was changed or an adapter switched, as `specdec.weights.states` sees it.

        Passes that were captured with other weights are dropped.
        """
        weights = states(self.model)
        if weights != self._weights:
            self._weights, self._edition = weights, self._edition + 1
            if self._static is not None:
                self._static.drop_graphs()
        return self._edition

    @contextmanager
    def memory_guard(self) -> Iterator[None]:
        """Say in one line where memory runs out, and give back what the failed pass held. Raises MemoryFullError."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            give_back_memory(error, self.device)
            raise MemoryFullError(
                f"out of memory on {self.device} for a context of this length: start a new chat, or choose a smaller --model."
            ) from error

    @torch.inference_mode()
    def prefill(
        self,
        cache: TreeCache,
        token_ids: Sequence[int],
        top_k: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> TopK | None:
        """Append ``token_ids`` to the committed prefix of ``cache``, in chunks.

        Returns the target's ``top_k`` next tokens after each of them (None for 0). Raises Cancelled between two chunks when
        ``cancelled()``; what is cached by then stays valid.
        """
        if self._static is not None:
            self._static.admit(cache)
        tops: list[TopK] = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            if cancelled():
                raise Cancelled
            chunk = torch.tensor([token_ids[start : start + PREFILL_CHUNK]], device=self.device)
            size = chunk.shape[1]
            positions = torch.arange(cache.length, cache.length + size, device=self.device)[None]
            logits = self._forward(chunk, cache, positions, last=not top_k)[0].float()
            cache.commit(range(size))
            if top_k:
                tops.append(top_tokens(logits, top_k))
        synchronize(self.device)  # else its last kernels would run on the first pass's clock
        return TopK.concatenate(tops) if tops else None

    @torch.inference_mode()
    def verify(self, cache: TreeCache, tree: TokenTree) -> Tensor:
        """One pass over ``tree`` behind the committed prefix: the next-token logits after each node, [N, V] float32.

        The nodes' K/V lies in the cache's scratch until the caller commits a path. The logits are valid until the next pass.
        """
        size = len(tree)
        if self._static is not None:
            if size <= BUCKETS[-1]:
                return self._static.verify(cache, tree)
            self._static.admit(cache)
        token_ids = to_device(tree.token_ids, self.device)[None]
        positions = to_device(tree.depths() + cache.length, self.device)[None]
        if size == 1:
            return self._forward(token_ids, cache, positions)[0].float()
        with cache.extended(size) as extent:
            return self._forward(token_ids, cache, positions, self._mask(tree, cache.length, extent))[0].float()

    @torch.inference_mode()
    def top_after(self, token_ids: NDArray[np.int64], top_k: int) -> TopK:
        """The target's ``top_k`` next tokens after each row of ``token_ids`` [B, T], each a text of its own."""
        return top_tokens(self._forward(torch.from_numpy(token_ids).to(self.device), last=True)[:, 0].float(), top_k)

    def batch_writer(self, max_length: int, top_k: int) -> BatchWriter:
        """Something that writes many texts of up to ``max_length`` tokens at once."""
        return BatchWriter(self, max_length, top_k)

    def measure_cost(self, context: int = 256, repeats: int = 4) -> PassCost:
        """Time passes of every width in `WIDTHS` behind ``context`` tokens: the fastest of ``repeats``, widths interleaved.

        The fastest, for a page that is opened meanwhile slows some of them, and the curve's shape must not suffer from it.
        Where passes are padded to some widths, the others cost what the padded ones do.
        """
        context = min(context, self.context_limit // 2)
        known = WIDTHS if self._static is None else BUCKETS
        widths = [width for width in known if context + width <= self.context_limit]
        cache = self.new_cache()
        self.prefill(cache, [token % self.vocab_size for token in range(context)])
        seconds = dict.fromkeys(widths, math.inf)
        for repeat in range(repeats + 1):
            for turn, width in enumerate(widths):
                if not (repeat and turn):  # each width of the first round, which may capture it
                    share = (repeat + turn / len(widths)) / (repeats + 1)
                    self.progress(f"measuring what a pass costs on {self.device}", share)
                tree = TokenTree.chain([token % self.vocab_size for token in range(width)])
                start = time.perf_counter()
                argmax(self.verify(cache, tree))
                if repeat:  # the first round warms up
                    seconds[width] = min(seconds[width], time.perf_counter() - start)
        if self._static is not None:
            seconds = {width: seconds[bucket(width)] for width in range(1, widths[-1] + 1)}
        return PassCost(seconds)

    def prepare(self, length: int) -> None:
        """Capture all passes that texts of up to ``length`` tokens may need, where passes are captured, before a clock runs."""
        if self._static is None:
            return
        cache = self.new_cache()
        contexts = [0]
        while (following := cache.bucket(contexts[-1] + 1)) < min(length + BUCKETS[-1], self.context_limit):
            contexts.append(following)
        self.prefill(cache, [0] * contexts[-1])
        for context in reversed(contexts):  # the longest first: graphs go when buffers grow
            for width in BUCKETS:
                cache.rewind(min(context, self.context_limit - width))
                self.verify(cache, TokenTree.chain([0] * width))

    @torch.inference_mode()
    def _layer_shapes(self) -> list[LayerShape]:
        """Where each layer puts its K/V: what one pass over one token leaves."""
        cache = DynamicCache(config=self.model.config)
        self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache)
        return [LayerShape.of(layer.keys, layer.values) for layer in cache.layers]

    def _home(self, capture: bool) -> TreeCache:
        """An empty cache for static passes: of full size at once where that is little: graphs go when buffers grow."""
        home = self.new_cache()
        if capture and home.full_size <= _HOME * free_bytes(self.device):
            home.reserve(home.max_length, home.padding)
        return home

    def _mask(self, tree: TokenTree, length: int, extent: int) -> Tensor:
        """Additive [1, 1, N, extent]: every node sees the whole prefix, its ancestors and itself; what is behind is hidden."""
        size = len(tree)
        visible = to_device(tree.ancestor_mask(), self.device)
        mask = torch.full((size, extent), torch.finfo(self.model.dtype).min, dtype=self.model.dtype, device=self.device)
        mask[:, :length] = 0
        mask[:, length : length + size].masked_fill_(visible, 0)
        return mask[None, None]

    def _forward(
        self,
        token_ids: Tensor,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] of ``token_ids`` [B, T] at ``positions`` [B, T]; with ``last`` of the last row only, [B, 1, V]."""
        # By index, not by count, which slices: a strided input makes a bfloat16 Linear 100 times slower on a CPU. On the CPU,
        # where an index serves whatever device the last layer is on.
        rows = torch.tensor([token_ids.shape[1] - 1]) if last else 0
        with folded(self.model), self._packed.in_force():
            logits: Tensor = self.model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=cache is not None,
                logits_to_keep=rows,
            ).logits
        return logits

    def _require_independent_rows(self) -> None:
        """Refuse a model of which a text's logits change with another text in the batch: so they would in a tree."""
        text, other = ([_SPREAD * token % self.vocab_size for token in range(start, start + 8)] for start in (2, 30))
        with torch.inference_mode():
            alone, beside = (
                self._forward(torch.tensor([text, second], device=self.device), last=True)[0, 0].float()
                for second in (text, other)
            )
        limit = _SHARED if self.model.dtype == torch.float32 else _TOO_FAR
        if (alone - beside).norm() > limit * (alone - alone.mean()).norm():
            raise UnsupportedModelError(
                f"{self.name} gives a token other logits if others are computed beside it, as dynamic quantisation does, whose "
                "scale all rows share: use weights in float32 or bfloat16, or quantised weights only."
            )

    def _require_tree_attention(self) -> None:
        """Verify a small tree and compare with its branches decoded one by one: no wrong text, from any architecture."""
        prompt = [_SPREAD * token % self.vocab_size for token in range(2, 8)]
        a, b, c = (_SPREAD * token % self.vocab_size for token in (11, 23, 37))
        tree = TokenTree(np.array([a, b, c, b], np.int64), np.array([-1, 0, 0, 2], np.int64))
        cache = self.new_cache()
        self.prefill(cache, prompt)
        seen = self.verify(cache, tree)
        with torch.inference_mode():
            for node in range(len(tree)):
                branch = torch.tensor([prompt + tree.token_ids[tree.path(node)].tolist()], device=self.device)
                plain = self._forward(branch, last=True)[0, 0].float()
                if (seen[node] - plain).norm() > _TOO_FAR * (plain - plain.mean()).norm():
                    raise UnsupportedModelError(
                        f"{self.name} gives other logits for a token tree than for the same text: its attention does not "
                        f"follow a 4-D mask and position ids. {_REMEDY}"
                    )


class BatchWriter:
    """Many texts that grow side by side, a token each per pass; see `specdec.speculators.vocabulary.Writer`."""

    def __init__(self, target: TargetModel, max_length: int, top_k: int) -> None:
        self._target, self._max_length, self._top_k = target, max_length, top_k

    def start(self, prompt: NDArray[np.int64], rows: int) -> TopK:
        """``rows`` new texts that all begin with ``prompt`` [T]; the target's view after it, [rows, K]."""
        self._cache, self._length = StaticCache(self._target.model.config, self._max_length), 0
        return self._append(np.repeat(prompt[None], rows, axis=0))

    def step(self, token_ids: NDArray[np.int64]) -> TopK:
        """Append one token to each text, [rows]; the target's view after it, [rows, K]."""
        return self._append(token_ids[:, None])

    @torch.inference_mode()
    def _append(self, token_ids: NDArray[np.int64]) -> TopK:
        tokens = torch.from_numpy(token_ids).to(self._target.device)
        positions = torch.arange(self._length, self._length + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._length += tokens.shape[1]
        return top_tokens(self._target._forward(tokens, self._cache, positions, last=True)[:, 0].float(), self._top_k)


def _is_static(device: torch.device, shapes: Sequence[LayerShape]) -> bool:
    """Whether a target on ``device`` with layers of ``shapes`` verifies in fixed shapes, if nobody says."""
    return device.type == "cuda" and {shape.device for shape in shapes} == {device} and not gpu_is_lent()


def _context_limit(config: PreTrainedConfig) -> int:
    """The most tokens of a text; 2**31 where the model knows no bound.

    Long rotary embeddings turn all positions anew where a text outgrows the length of pretraining, so the K/V that is cached by
    then would be wrong: such a model is used up to that length.
    """
    limit: int = getattr(config, "max_position_embeddings", None) or 2**31
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        limit = min(limit, rotary.get("original_max_position_embeddings", limit))
    return limit


def _require_full_attention(model: PreTrainedModel, context_limit: int) -> None:
    """Refuse, by name, what a token tree cannot be verified on. A window as long as the context hides nothing."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; a causal language model is needed. {_REMEDY}")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state, which cannot branch; a token tree cannot be verified. {_REMEDY}"
        )
    attention = str(model.config._attn_implementation)
    if attention.startswith(("flex", "flash")):
        raise UnsupportedModelError(
            f"{name} attends by {attention}, which takes no 4-D mask: call its set_attn_implementation('sdpa') first."
        )
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode, where dropout makes it random: call its eval() first.")
    kinds, details = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    for index, (kind, detail) in enumerate(zip(kinds, details, strict=True)):
        wide = kind == "sliding_attention" and detail["sliding_window"] >= context_limit
        if kind != "full_attention" and not wide:
            raise UnsupportedModelError(
                f"{name} cannot verify a token tree: its layer {index} has {kind.replace('_', ' ')}. {_REMEDY}"
            )
    accepted = inspect.signature(model.forward).parameters
    for parameter in ("position_ids", "attention_mask", "cache", "logits_to_keep"):
        if parameter not in accepted:
            raise UnsupportedModelError(f"{name} cannot verify a token tree: forward takes no {parameter}. {_REMEDY}")
