"""TargetModel: the only caller of a Hugging Face forward.

Tree attention needs no forked model: transformers passes a ready-made 4-D attention mask and explicit position ids through
untouched, so one ordinary forward verifies a whole token tree.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache, get_layer_types_and_kwargs

from specdec.attention import FOLDED, Pack, folded, packed
from specdec.cache import STRIDE, LayerShape, PackedCache, TreeCache
from specdec.cost import WIDTHS, PassCost
from specdec.devices import free_bytes, give_back_memory, gpu_is_lent
from specdec.errors import MemoryFullError, first_line, is_out_of_memory
from specdec.logits import argmax, top_tokens
from specdec.packing import PackedWeights
from specdec.slots import PADDING, SEQUENCES, Slots
from specdec.speculators import TopK
from specdec.static import BUCKETS, StaticPass, bucket
from specdec.transfer import synchronize, to_device
from specdec.tree import TokenTree
from specdec.weights import states

PREFILL_CHUNK = 512
"""Prompt tokens per prefill pass: bounds memory and the wait for a cancellation."""
COMPANY = 4
"""Texts in the pass that tells what a text adds to the cost of another's."""
_COMPANY_WIDTH = 4
"""Nodes of each."""
_SLOTS = 0.25
"""Share of the free device memory that the slots of captured passes may take."""
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


@dataclass(frozen=True, slots=True)
class Span:
    """One text's share of a pass: ``tree`` behind what ``cache`` holds, to be verified or, as a chain, read.

    ``logits``: whether they are wanted; where only K/V is, the head is not computed.
    """

    cache: TreeCache
    tree: TokenTree
    logits: bool = True


class TargetModel:
    """A causal language model seen as: one pass over the trees of several texts, at a measured cost.

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
        self._packs = True
        self._weights, self._edition = states(model), 0
        self._static: StaticPass | None = None
        if static:
            self._static = StaticPass(
                self._forward, self._slots(cuda), self.vocab_size, model.dtype, cuda, lambda text: self.progress(text, None)
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
        self._packs = self.packs and self._packs_exactly()

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return torch.device(self.model.device)

    @property
    def packs(self) -> bool:
        """Whether several texts share one forward; else each has its own. Not once the model is made to attend otherwise."""
        return self._packs and self.model.config._attn_implementation in ("sdpa", FOLDED)

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
        """Raise what is raised inside as `explained`."""
        try:
            yield
        except Exception as error:
            told = self.explained(error)
            if told is error:
                raise
            raise told from error

    def explained(self, error: Exception) -> Exception:
        """``error``; where it says that memory ran out, MemoryFullError in one line, and what the failed pass held is freed."""
        if not is_out_of_memory(error):
            return error
        give_back_memory(error, self.device)
        return MemoryFullError(
            f"out of memory on {self.device} for a context of this length: start a new chat, or choose a smaller --model."
        )

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
        tops: list[TopK] = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            if cancelled():
                raise Cancelled
            chunk = TokenTree.chain(token_ids[start : start + PREFILL_CHUNK])
            (logits,) = self.run([Span(cache, chunk, logits=top_k > 0)])
            cache.commit(range(len(chunk)))
            if top_k:
                tops.append(top_tokens(logits, top_k))
        synchronize(self.device)  # else its last kernels would run on the first pass's clock
        return TopK.concatenate(tops) if tops else None

    def verify(self, cache: TreeCache, tree: TokenTree) -> Tensor:
        """A pass over one ``tree``: `run` for a lone text."""
        return self.run([Span(cache, tree)])[0]

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[Tensor]:
        """One pass over the trees of all ``spans``: the next-token logits after each node, [N, V] float32 (else [0, V]).

        The nodes' K/V lies in the scratch of their caches until the caller commits a path. The logits are valid until the next
        pass. Raises ValueError past a cache's maximum.
        """
        return self._run_together(spans) if self._static is None else self._run_static(self._static, spans)

    def _run_static(self, static: StaticPass, spans: Sequence[Span]) -> list[Tensor]:
        """`run` where trees are verified in fixed shapes; what is longer, or needs no logits, runs as it is, in the slots."""
        fits = [span.logits and len(span.tree) <= BUCKETS[-1] for span in spans]
        padded = [(span.cache, span.tree) for span, fit in zip(spans, fits, strict=True) if fit]
        longer = [span for span, fit in zip(spans, fits, strict=True) if not fit]
        verified = iter(static.verify(padded) if padded else [])
        for span in longer:
            static.slots.admit([span.cache], len(span.tree) + STRIDE)
        read = iter(self._run_together(longer) if longer else [])
        return [next(verified if fit else read) for fit in fits]

    def _run_together(self, spans: Sequence[Span]) -> list[Tensor]:
        """`run` in shapes as they are: in one forward where the model lets several texts share one."""
        if len(spans) > 1 and not self.packs:
            return [self._run((span,))[0] for span in spans]
        return self._run(spans)

    def _run(self, spans: Sequence[Span]) -> list[Tensor]:
        """`run` in one forward: a lone text as it is, several with their nodes one behind the other."""
        sizes = [len(span.tree) for span in spans]
        token_ids = to_device(np.concatenate([span.tree.token_ids for span in spans]), self.device)[None]
        depths = [span.tree.depths() + span.cache.length for span in spans]
        positions = to_device(np.concatenate(depths), self.device)[None]
        wanted = [size if span.logits else 0 for size, span in zip(sizes, spans, strict=True)]
        with ExitStack() as stack:
            masks = [self._mask(span, stack) for span in spans]
            if len(spans) == 1:
                logits = self._forward(token_ids, spans[0].cache, positions, masks[0], self._rows(sizes, wanted))
            else:
                for span, size in zip(spans, sizes, strict=True):
                    span.cache.reserve(size)
                ends = [span.cache.length + size for span, size in zip(spans, sizes, strict=True)]
                extents = [end if mask is None else mask.shape[-1] for end, mask in zip(ends, masks, strict=True)]
                pack = Pack(sizes, masks)
                cache = PackedCache([span.cache for span in spans], extents, pack)
                stack.enter_context(packed(pack))
                no_mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.device)  # else one would be made
                logits = self._forward(token_ids, cache, positions, no_mask, self._rows(sizes, wanted))
                if pack.attended != len(self._shapes):  # else texts would see one another
                    raise RuntimeError(
                        f"only {pack.attended} of {len(self._shapes)} layers kept the texts of a pass apart "
                        f"(attention: {self.model.config._attn_implementation})"
                    )
        rows = logits[0] if any(wanted) else logits[0, :0]
        return list(rows.float().split_with_sizes(wanted))

    @staticmethod
    def _rows(sizes: Sequence[int], wanted: Sequence[int]) -> Tensor | int:
        """What to ask of the head, as transformers' ``logits_to_keep``: 0 for all rows; one row where none is wanted."""
        if list(sizes) == list(wanted):
            return 0
        ends = np.cumsum(sizes)
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, wanted, strict=True)])
        return torch.from_numpy(rows if len(rows) else ends[-1:] - 1)

    @torch.inference_mode()
    def top_after(self, token_ids: NDArray[np.int64], top_k: int) -> TopK:
        """The target's ``top_k`` next tokens after each row of ``token_ids`` [B, T], each a text of its own."""
        return top_tokens(self._last(torch.from_numpy(token_ids).to(self.device)), top_k)

    def batch_writer(self, max_length: int, top_k: int) -> BatchWriter:
        """Something that writes many texts of up to ``max_length`` tokens at once."""
        return BatchWriter(self, max_length, top_k)

    def measure_cost(self, context: int = 256, repeats: int = 4) -> PassCost:
        """Time passes of every width in `WIDTHS` behind ``context`` tokens, and one over `COMPANY` texts: the fastest of some.

        They are interleaved, ``repeats`` times. The fastest counts, for a page that is opened meanwhile slows some of them, and
        the curve's shape must not suffer from it. Where passes are padded to some widths, the others cost what these do.
        """
        context = min(context, self.context_limit // 2)
        known = WIDTHS if self._static is None else BUCKETS
        passes = {width: (1, width) for width in known if context + width <= self.context_limit}
        passes[0] = (COMPANY, _COMPANY_WIDTH)
        caches = [self.new_cache()] * COMPANY  # in one scratch: what the passes say means nothing
        self.prefill(caches[0], [token % self.vocab_size for token in range(context)])
        if self._static is not None:  # where each text has a slot of its own
            caches = [caches[0], *(self.new_cache() for _ in caches[1:])]
            for cache in caches[1:]:
                cache.copy(caches[0], context)
        seconds = dict.fromkeys(passes, math.inf)
        for repeat in range(repeats + 1):
            for turn, (width, (texts, nodes)) in enumerate(passes.items()):
                if not (repeat and turn):  # each width of the first round, which may capture it
                    share = (repeat + turn / len(passes)) / (repeats + 1)
                    self.progress(f"measuring what a pass costs on {self.device}", share)
                tree = TokenTree.chain([token % self.vocab_size for token in range(nodes)])
                start = time.perf_counter()
                argmax(self.run([Span(cache, tree) for cache in caches[:texts]])[-1])
                if repeat:  # the first round warms up
                    seconds[width] = min(seconds[width], time.perf_counter() - start)
        company = seconds.pop(0)
        if self._static is not None:
            seconds = {width: seconds[bucket(width)] for width in range(1, max(seconds) + 1)}
        alone = float(PassCost(seconds).seconds(COMPANY * _COMPANY_WIDTH))
        return PassCost(seconds, (company - alone) / (COMPANY - 1))

    def prepare(self, length: int, texts: int = 1) -> None:
        """Capture all passes that up to ``texts`` texts of up to ``length`` tokens may need, before a clock runs.

        Nothing where passes are not captured.
        """
        if self._static is None:
            return
        caches = [self.new_cache() for _ in range(texts)]
        contexts = [0]
        while (following := caches[0].bucket(contexts[-1] + 1)) < min(length + BUCKETS[-1], self.context_limit):
            contexts.append(following)
        self.prefill(caches[0], [0] * contexts[-1])
        for cache in caches[1:]:
            cache.copy(caches[0], contexts[-1])
        counts = [count for count in SEQUENCES if count < 2 * texts]
        for context in reversed(contexts):  # the longest first: graphs go when buffers grow
            for width in BUCKETS:
                for cache in caches:
                    cache.rewind(min(context, self.context_limit - width))
                for count in counts:
                    self.run([Span(cache, TokenTree.chain([0] * width)) for cache in caches[:count]])

    @torch.inference_mode()
    def _layer_shapes(self) -> list[LayerShape]:
        """Where each layer puts its K/V: what one pass over one token leaves."""
        cache = DynamicCache(config=self.model.config)
        self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache)
        return [LayerShape.of(layer.keys, layer.values) for layer in cache.layers]

    def _slots(self, capture: bool) -> Slots:
        """The slots of static passes; where these are captured as large as may be at once, for graphs go when buffers grow."""
        slots = Slots(self.new_cache(), lambda: _SLOTS * free_bytes(self.device))
        if capture:
            slots.reserve_all()
        return slots

    def _mask(self, span: Span, stack: ExitStack) -> Tensor | None:
        """Additive [1, 1, N, extent]: every node sees the whole prefix, its ancestors and itself; what is behind is hidden.

        None where transformers' own causal mask serves. ``stack`` keeps the cache extended as far as the mask reaches.
        """
        tree, length, size = span.tree, span.cache.length, len(span.tree)
        if size == 1 or (length == 0 and tree.is_chain):
            return None
        extent = stack.enter_context(span.cache.extended(size))
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
        rows: Tensor | int = 0,
    ) -> Tensor:
        """Logits [B, T, V] of ``token_ids`` [B, T] at ``positions`` [B, T]; only of ``rows``, where they are not 0."""
        # By index, not by count, which slices: a strided input makes a bfloat16 Linear 100 times slower on a CPU. On the CPU,
        # where an index serves whatever device the last layer is on.
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

    def _last(self, token_ids: Tensor, cache: Cache | None = None, positions: Tensor | None = None) -> Tensor:
        """The logits [B, V] float32 after the last of ``token_ids`` [B, T]."""
        return self._forward(token_ids, cache, positions, rows=torch.tensor([token_ids.shape[1] - 1]))[:, 0].float()

    def _require_independent_rows(self) -> None:
        """Refuse a model of which a text's logits change with another text in the batch: so they would in a tree."""
        text, other = ([_SPREAD * token % self.vocab_size for token in range(start, start + 8)] for start in (2, 30))
        with torch.inference_mode():
            alone, beside = (self._last(torch.tensor([text, second], device=self.device))[0] for second in (text, other))
        limit = _SHARED if self.model.dtype == torch.float32 else _TOO_FAR
        if (alone - beside).norm() > limit * (alone - alone.mean()).norm():
            raise UnsupportedModelError(
                f"{self.name} gives a token other logits if others are computed beside it, as dynamic quantisation does, whose "
                "scale all rows share: use weights in float32 or bfloat16, or quantised weights only."
            )

    def _require_tree_attention(self) -> None:
        """Verify a small tree and compare with its branches decoded one by one: no wrong text, from any architecture."""
        span = self._sample(6)
        seen = self.run([span])[0]
        prompt, tree = self._tokens(6), span.tree
        with torch.inference_mode():
            for node in range(len(tree)):
                branch = torch.tensor([prompt + tree.token_ids[tree.path(node)].tolist()], device=self.device)
                if _differ(seen[node], self._last(branch)[0]):
                    raise UnsupportedModelError(
                        f"{self.name} gives other logits for a token tree than for the same text: its attention does not "
                        f"follow a 4-D mask and position ids. {_REMEDY}"
                    )

    @torch.inference_mode()
    def _packs_exactly(self) -> bool:
        """Whether a pass over two texts says what one over each says: not where attention does not ask transformers."""
        spans = [self._sample(6), self._sample(3)]
        alone = torch.cat([self._run([span])[0] for span in spans])
        together = torch.cat(self._run(spans))
        return not any(map(_differ, together, alone))

    def _tokens(self, size: int) -> list[int]:
        return [_SPREAD * token % self.vocab_size for token in range(2, 2 + size)]

    def _sample(self, prefix: int) -> Span:
        """A small tree behind a text of ``prefix`` tokens."""
        a, b, c = (_SPREAD * token % self.vocab_size for token in (11, 23, 37))
        cache = self.new_cache()
        self.prefill(cache, self._tokens(prefix))
        return Span(cache, TokenTree(np.array([a, b, c, b], np.int64), np.array([-1, 0, 0, 2], np.int64)))


def _differ(logits: Tensor, others: Tensor) -> bool:
    """Whether two rows of logits [V] differ by more than rounding makes them."""
    return bool((logits - others).norm() > _TOO_FAR * (others - others.mean()).norm())


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
        return top_tokens(self._target._last(tokens, self._cache, positions), self._top_k)


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
