"""What a pass costs on this device beside what it must: the memory's bandwidth, the engine's overhead, the curve by width."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.cost import WIDTHS
from specdec.engine import SpeculativeEngine
from specdec.transfer import synchronize
from specdec.tree import TokenTree

CONTEXT, STEPS = 256, 32
"""Tokens before the measured passes, and plain steps that are timed."""
COPIED = 1 << 28
"""Bytes of the buffer that is copied: well beyond any cache."""
ROUNDS, PASSES, COPIES = 3, 3, 8
"""Rounds of each measurement; passes and copies queued in a round without a wait."""


def measure_cost(engine: SpeculativeEngine) -> dict[str, Any]:
    """The figures of this device and model, in bytes and seconds.

    A plain pass must read the weights and the context's K/V once, so ``copy_bytes_per_second / bytes_per_pass`` is a limit
    for plain decoding. ``pass_seconds`` are those of passes on their own, back to back, by width; what a plain step takes
    beyond that of width 1 is the engine's overhead.
    """
    context = min(CONTEXT, engine.target.context_limit // 2)
    bandwidth = copy_bandwidth(engine.target.device, COPIED)
    bytes_read = bytes_per_pass(engine.model, context)
    passes = _pass_seconds(engine, context)
    step = _plain_step_seconds(engine, context)
    return {
        "context": context,
        "copy_bytes_per_second": bandwidth,
        "bytes_per_pass": bytes_read,
        "limit_tokens_per_second": bandwidth / bytes_read,
        "plain_tokens_per_second": 1 / step,
        "share_of_limit": bytes_read / bandwidth / step,
        "overhead_seconds": step - passes[1],
        "pass_seconds": {str(width): seconds for width, seconds in passes.items()},
    }


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes within the device's memory: the best of some rounds."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = 0.0
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        synchronize(device)
        best = max(best, 2 * COPIES * size / (time.perf_counter() - start))
    return best


def bytes_per_pass(model: PreTrainedModel, context: int) -> int:
    """Bytes that a single-token pass must read: all weights but the rows of the embedding it skips, and the context's K/V."""
    config = model.config.get_text_config(decoder=True)
    weights = sum(weight.nbytes for weight in model.parameters())
    table = model.get_input_embeddings().weight
    if table is not model.get_output_embeddings().weight:
        weights -= table.nbytes - table[0].nbytes
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(weights + 2 * config.num_hidden_layers * heads * width * context * model.dtype.itemsize)


def cost_text(cost: dict[str, Any]) -> str:
    """`measure_cost`'s figures in three lines."""
    passes = {int(width): seconds for width, seconds in cost["pass_seconds"].items()}
    widest = max(passes)
    return (
        f"a plain pass reads {cost['bytes_per_pass'] / 1e9:.3f} GB (weights, {cost['context']} tokens of K/V); memory copies "
        f"{cost['copy_bytes_per_second'] / 1e9:.1f} GB/s: at most {cost['limit_tokens_per_second']:.1f} tok/s\n"
        f"plain decoding {cost['plain_tokens_per_second']:.1f} tok/s, {cost['share_of_limit']:.0%} of that; "
        f"engine overhead {1e3 * cost['overhead_seconds']:.2f} ms per step\n"
        f"milliseconds of a pass by width: {', '.join(f'{width}: {1e3 * s:.2f}' for width, s in passes.items())} "
        f"({widest} nodes cost {passes[widest] / passes[1]:.2f} plain passes)"
    )


def _pass_seconds(engine: SpeculativeEngine, context: int) -> dict[int, float]:
    """Seconds by width: medians of rounds in which every width takes its turn, passes of one turn queued without a wait."""
    target = engine.target
    cache = target.new_cache()
    target.prefill(cache, _text(engine, context))
    trees = {w: TokenTree.chain(_text(engine, w)) for w in WIDTHS if context + w <= target.context_limit}
    samples: dict[int, list[float]] = {width: [] for width in trees}
    for turn in range(ROUNDS + 1):
        for width, tree in trees.items():
            synchronize(target.device)
            start = time.perf_counter()
            for _ in range(PASSES):
                target.verify(cache, tree)
            synchronize(target.device)
            if turn:  # the first round warms up
                samples[width].append((time.perf_counter() - start) / PASSES)
    return {width: statistics.median(seconds) for width, seconds in samples.items()}


def _plain_step_seconds(engine: SpeculativeEngine, context: int) -> float:
    """The median step of a plain reply, from outside; no end-of-sequence token ends it."""
    stream = engine.stream(
        _text(engine, context),
        decoding="plain",
        do_sample=False,
        max_new_tokens=min(STEPS, engine.target.context_limit - context),
        eos_token_id=engine.target.vocab_size,
    )
    next(stream)  # prefill, and the first pass after it
    moments = [time.perf_counter()]
    for _ in stream:
        moments.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(moments))


def _text(engine: SpeculativeEngine, length: int) -> list[int]:
    return [token % engine.target.vocab_size for token in range(length)]
