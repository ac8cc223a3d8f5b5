"""Verifying in fixed shapes says what verifying trees as they are says, and nothing but its inputs changes between passes.

On this CPU a recording stands in for a CUDA graph (`toys.Recording`): the same kernels on the same memory, no Python between.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import PROMPT, ids, oracle
from toys import ARCHITECTURES, CONTEXT, PATHS, VOCAB, replay_passes, tiny_engine, tiny_model, tokenizer

from specdec.cache import LayerShape, Slab, TreeCache
from specdec.cost import PassCost
from specdec.engine import SpeculativeEngine
from specdec.errors import MemoryFullError
from specdec.request import MAX_BUDGET
from specdec.slots import PADDING, SEQUENCES, Slots
from specdec.static import BUCKETS, StaticPass, bucket
from specdec.step import Step
from specdec.target import Span, TargetModel, _is_static
from specdec.tree import TokenTree

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far logits may be apart, in shares of their norm, where a pass of another shape rounds otherwise."""


def bushy(size: int, seed: int = 0) -> TokenTree:
    """A random tree of exactly ``size`` nodes."""
    random = np.random.default_rng(seed)
    parents = np.array([-1, *(random.integers(0, node) for node in range(1, size))], np.int64)
    return TokenTree(np.arange(20, 20 + size, dtype=np.int64), parents)


@pytest.fixture
def short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of 16, 32, 64, 128 positions, then all there is."""
    monkeypatch.setattr("specdec.cache.BLOCK", 16)


@pytest.fixture
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is so short that one text at a time lives in the buffers of the passes."""
    monkeypatch.setattr("specdec.target.free_bytes", lambda _: 0.0)


def replayed(architecture: str = "llama") -> SpeculativeEngine:
    """An engine of its own, whose passes are recorded and replayed."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES[architecture]), tokenizer(), static=True)
    replay_passes(engine.target)
    return engine


def test_the_largest_tree_fits_the_widest_pass_and_its_padding_fits_the_cache() -> None:
    assert BUCKETS[-1] == MAX_BUDGET + 1
    assert max(bucket(size) for size in range(1, BUCKETS[-1] + 1)) <= PADDING


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_width_and_length_edge_gives_the_logits_of_the_exact_pass(architecture: str, short_buckets: None) -> None:
    exact, static = tiny_engine(architecture).target, replayed(architecture).target
    sizes = sorted({size for width in BUCKETS for size in (width, width + 1) if size <= BUCKETS[-1]})
    for length in (0, 1, 15, 16, 31, 63, 100, CONTEXT - 65):
        for size in sizes:
            logits = []
            for target in (exact, static):
                cache = target.new_cache()
                target.prefill(cache, [4 + i % 90 for i in range(length)])
                logits.append(target.verify(cache, bushy(size)).clone())
            assert torch.isfinite(logits[1]).all()
            torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_up_to_the_last_position_and_not_beyond() -> None:
    exact, static = tiny_engine().target, replayed().target
    logits = []
    for target in (exact, static):
        cache = target.new_cache()
        target.prefill(cache, [4 + i % 90 for i in range(CONTEXT - 3)])
        logits.append(target.verify(cache, bushy(3)).clone())
        with pytest.raises(ValueError, match="maximum"):
            target.verify(cache, bushy(4))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_a_reply_that_outgrows_its_buffers_is_the_same(short_buckets: None) -> None:
    engine = replayed()
    expected = ids(list(tiny_engine().stream(PROMPT, decoding="plain", max_new_tokens=140, eos_token_id=VOCAB)))
    for decoding in ("plain", "tree"):
        assert ids(list(engine.stream(PROMPT, decoding=decoding, max_new_tokens=140, eos_token_id=VOCAB))) == expected
    short = "ab"  # back in a short bucket, whose recordings went with the buffers they knew
    assert ids(list(engine.stream(short, max_new_tokens=9))) == ids(list(tiny_engine().stream(short, max_new_tokens=9)))


@settings(max_examples=15, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), min_size=2, max_size=14))
def test_conversations_that_take_turns_keep_what_is_theirs(turns: list[tuple[int, int, bool]]) -> None:
    """Passes, commits and rewinds of three conversations in any order; a pass may be committed after another's pass."""
    target = tiny_engine(path="replayed").target
    caches, texts = [target.new_cache() for _ in range(3)], [[5], [6], [7]]
    pending: list[TokenTree | None] = [None] * 3
    for who, size, rewinds in turns:
        cache, text = caches[who], texts[who]
        if (verified := pending[who]) is not None:
            path = verified.path(len(verified) - 1)
            cache.commit(path)
            text += verified.token_ids[path[1:]].tolist()
            if rewinds:
                cache.rewind(cache.length // 2)
                del text[cache.length :]
            text.append(9)
        pending[who] = tree = bushy(size)
        tree.token_ids[0] = text[-1]
        logits = target.verify(cache, tree).clone()
        exact = tiny_engine().target
        fresh = exact.new_cache()
        exact.prefill(fresh, text[: cache.length])
        torch.testing.assert_close(logits, exact.verify(fresh, tree), atol=1e-4, rtol=1e-4)


def test_what_another_conversation_left_behind_the_prefix_reaches_no_pass(short_buckets: None, one_slot: None) -> None:
    static, exact = replayed().target, tiny_engine().target
    leaver, comer, fresh = static.new_cache(), static.new_cache(), exact.new_cache()
    static.prefill(leaver, list(range(10, 34)))
    with torch.inference_mode():
        for slab in leaver.slabs:
            slab.keys[:, :, leaver.length :] = torch.nan
            slab.values[:, :, leaver.length :] = torch.inf
    logits = []
    for target, cache in ((static, comer), (exact, fresh)):
        target.prefill(cache, list(range(10, 30)))
        logits.append(target.verify(cache, bushy(5)).clone())
    assert torch.isfinite(logits[0]).all()
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_who_moves_out_takes_what_it_holds_and_who_holds_nothing_takes_nothing(short_buckets: None, one_slot: None) -> None:
    target = replayed().target
    first, second, third = (target.new_cache() for _ in range(3))
    target.prefill(first, list(range(10, 34)))
    target.prefill(second, [5, 6, 7])
    assert first.slabs[0].capacity == first.length + PADDING
    second.clear()
    target.prefill(third, [5, 6, 7])
    assert second.slabs[0].capacity == 0


def test_no_cache_is_copied_while_one_conversation_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replayed()
    assert engine.pass_cost
    copies = count_copies(monkeypatch)
    chats = [engine.conversation(), engine.conversation()]
    list(engine.stream(PROMPT, conversation=chats[0], max_new_tokens=20))
    list(engine.stream(PROMPT + " on", conversation=chats[0], max_new_tokens=20))
    assert len(copies) == 0
    list(engine.stream(PROMPT, conversation=chats[1], max_new_tokens=20))
    assert len(copies) <= 2, "the first moves out of the first slot, the second moves there"
    list(engine.stream(PROMPT, conversation=chats[0], max_new_tokens=20))
    assert len(copies) <= 5, "the first moves in again, and to the first slot as the second moves out"


def count_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the positions of every copy of K/V from now on."""
    copies: list[int] = []
    take = Slab.take

    def counted(mine: Slab, theirs: Slab, length: int) -> None:
        if length:
            copies.append(length)
        take(mine, theirs, length)

    monkeypatch.setattr(Slab, "take", counted)
    return copies


def begun(target: TargetModel, lengths: Sequence[int]) -> list[TreeCache]:
    """Texts of these lengths, each of other tokens."""
    caches = [target.new_cache() for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        target.prefill(cache, [4 + (7 * seed + i) % 90 for i in range(length)])
    return caches


def count_batches(monkeypatch: pytest.MonkeyPatch, static: StaticPass) -> list[int]:
    """Grows by the rows of every captured pass from now on."""
    batches: list[int] = []
    run = static._run

    def counted(count: int, width: int, length: int) -> None:
        batches.append(count)
        run(count, width, length)

    monkeypatch.setattr(static, "_run", counted)
    return batches


LENGTHS = (5, 40, 0, 17, 100, 64, 31, 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_pass_over_several_texts_gives_each_the_logits_that_it_gets_alone(
    architecture: str, short_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    static, exact = replayed(architecture).target, tiny_engine(architecture).target
    assert static._static is not None
    batches = count_batches(monkeypatch, static._static)
    caches, references = begun(static, LENGTHS), begun(exact, LENGTHS)
    batches.clear()
    for company in (8, 3, 1, 8):
        trees = [bushy(1 + 9 * (who + company) % 20, seed=who) for who in range(company)]
        spans = [Span(cache, tree) for cache, tree in zip(caches, trees, strict=False)]
        for span, logits, reference in zip(spans, static.run(spans), references, strict=False):
            torch.testing.assert_close(logits, exact.verify(reference, span.tree), atol=1e-4, rtol=1e-4)
            for cache in (span.cache, reference):
                cache.commit(span.tree.path(len(span.tree) - 1))
        assert batches.pop() >= company
        assert not batches, "one pass"


def test_more_texts_than_slots_run_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    static, exact = replayed().target, tiny_engine().target
    assert static._static is not None
    caches, references = (begun(target, (LENGTHS * 2)[:11]) for target in (static, exact))
    batches = count_batches(monkeypatch, static._static)
    for turn in range(3):
        trees = [bushy(3 + who, seed=turn) for who in range(11)]
        logits = static.run([Span(cache, tree) for cache, tree in zip(caches, trees, strict=True)])
        for rows, cache, reference, tree in zip(logits, caches, references, trees, strict=True):
            torch.testing.assert_close(rows, exact.verify(reference, tree), atol=1e-4, rtol=1e-4)
            for each in (cache, reference):
                each.commit(tree.path(len(tree) - 1))
    assert batches == [8, 4] * 3 or batches == [8, 8] * 3


def test_no_kv_is_copied_while_the_same_texts_are_decoded_pass_after_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each time some of them do not take part, as when they wait for their readers."""
    target = replayed().target
    caches = begun(target, LENGTHS)
    target.run([Span(cache, bushy(4)) for cache in caches])
    copies = count_copies(monkeypatch)
    for turn in range(12):
        target.run([Span(cache, bushy(4)) for who, cache in enumerate(caches) if (who + turn) % 3])
        for who, cache in enumerate(caches):
            if (who + turn) % 3:
                cache.commit([0])
    assert copies == []


def test_a_text_that_is_left_alone_moves_to_the_first_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = replayed().target
    assert target._static is not None
    caches = begun(target, LENGTHS[:4])
    copies, batches = count_copies(monkeypatch), count_batches(monkeypatch, target._static)
    for _ in range(12):
        target.verify(caches[3], bushy(4))
    assert batches == [4] * batches.count(4) + [1] * batches.count(1)
    assert batches.count(1) > 6
    assert len(copies) == 2, "the idle one moved out, this one moved down"
    for cache in caches[1:3]:
        cache.clear()
    target.run([Span(cache, bushy(4)) for cache in (caches[3], caches[0])])
    assert batches[-1] == 2, "free slots are taken at once"


def test_a_pass_writes_nothing_into_slots_of_texts_that_take_no_part(short_buckets: None) -> None:
    """Not into their prefix, and not into the nodes of their last pass, which may yet be committed."""
    target = replayed().target
    caches = begun(target, (150, 20, 30))
    target.verify(caches[0], bushy(40))
    held = [slab.keys[:, :, :190].clone() for slab in caches[0].slabs]
    target.verify(caches[2], bushy(20))
    target.verify(caches[2], bushy(3))
    assert all(torch.equal(slab.keys[:, :, :190], keys) for slab, keys in zip(caches[0].slabs, held, strict=True))


def test_nothing_of_another_slot_reaches_a_text(short_buckets: None) -> None:
    static, exact = replayed().target, tiny_engine().target
    caches, references = (begun(target, (20, 30, 40)) for target in (static, exact))
    with torch.inference_mode():
        for cache, start in ((caches[0], 0), (caches[1], 0)):
            for slab in cache.slabs:
                slab.keys[:, :, start:] = torch.nan
                slab.values[:, :, start:] = torch.inf
    assert not static.run([Span(cache, bushy(5)) for cache in caches])[0].isfinite().any()
    logits = static.verify(caches[2], bushy(5)).clone()
    torch.testing.assert_close(logits, exact.verify(references[2], bushy(5)), atol=1e-4, rtol=1e-4)
    caches[0].clear()
    (comer,), (fresh,) = begun(static, (25,)), begun(exact, (25,))
    torch.testing.assert_close(static.verify(comer, bushy(9)), exact.verify(fresh, bushy(9)), atol=1e-4, rtol=1e-4)


def test_a_pass_is_recorded_once_per_width_and_length_and_only_replayed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, forwards = replayed(), 0
    list(engine.stream(PROMPT, max_new_tokens=30, budget=7, conversation=oracle(engine, list(range(20, 50)))))
    forward = engine.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", counted)
    steps = list(engine.stream(PROMPT, max_new_tokens=30, budget=7, conversation=oracle(engine, list(range(20, 50)))))
    assert len(steps) > 10
    assert forwards == 0, "a short prompt, too, is read in fixed shapes"


def test_a_pass_that_was_captured_first_says_nothing_of_what_passes_cost(
    short_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, observed, recorded = replayed(), 0, 0
    static = engine.target._static
    assert static is not None
    assert engine.pass_cost  # measured now
    record, observe = static._captured, PassCost.observe

    def recording(*shape: int) -> Any:
        nonlocal recorded
        recorded += 1
        return record(*shape)

    def counted(cost: PassCost, width: int, seconds: float, sequences: int) -> None:
        nonlocal observed
        observed += 1
        observe(cost, width, seconds, sequences)

    monkeypatch.setattr(static, "_captured", recording)
    monkeypatch.setattr(PassCost, "observe", counted)
    steps = list(engine.stream(PROMPT, decoding="plain", max_new_tokens=140, eos_token_id=VOCAB))
    assert recorded > 1, "the buffers grow in the middle of the reply"
    assert observed == len(steps) - recorded


def test_what_was_prepared_is_not_captured_later(short_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replayed()
    engine.target.prepare(CONTEXT)
    assert engine.pass_cost
    monkeypatch.setattr(engine.target._static, "_captured", lambda *_: pytest.fail("captured on the clock"))
    for budget in (0, 7, 64):
        list(engine.stream(PROMPT, max_new_tokens=140, budget=budget, eos_token_id=VOCAB))


def test_slots_are_as_large_as_a_quarter_of_the_free_memory_allows(
    monkeypatch: pytest.MonkeyPatch, short_buckets: None
) -> None:
    target = tiny_engine().target
    each = target.new_cache().size(1)
    full = CONTEXT + PADDING
    for positions, capacity in ((8 * full, full), (8 * full - 1, 128), (8 * 128 - 1, 64), (8 * 16 - 1, 0)):
        monkeypatch.setattr("specdec.target.free_bytes", lambda _, free=4 * each * positions: float(free))
        slots = target._slots(capture=True)
        assert (slots.capacity, len(slots)) == (capacity, 8 if capacity else 0)
        slots.reserve(CONTEXT)
        fit = [count for count in SEQUENCES if count * full <= positions]
        assert (slots.capacity, len(slots)) == (full, max(fit, default=1))
        assert target._slots(capture=False).capacity == 0


def test_who_waits_is_told_of_each_capture_and_of_each_width_that_is_measured_first() -> None:
    told: list[tuple[str, float | None]] = []
    target = TargetModel(tiny_model(ARCHITECTURES["llama"]), True, lambda text, share: told.append((text, share)))
    replay_passes(target)
    target.measure_cost(context=20, repeats=2)
    captures = [text for text, share in told if share is None]
    alone = [f"capturing the target pass of width {width} over {CONTEXT + PADDING} positions" for width in BUCKETS]
    assert captures == [*alone, f"capturing the target pass of 4 texts of width 4 over {CONTEXT + PADDING} positions"]
    shares = [share for text, share in told if text == "measuring what a pass costs on cpu" and share is not None]
    assert shares == sorted(set(shares))
    assert len(shares) == len(BUCKETS) + 3, "each width and one with company first, then two rounds"


@pytest.mark.parametrize("sampled", [False, True])
def test_where_all_is_drawn_at_once_the_view_of_a_tree_comes_in_the_same_transfer(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 30, "budget": 7, "do_sample": sampled, "details": True}
    future = list(range(20, 50))
    exact, static = tiny_engine(), replayed()
    expected = list(exact.stream(PROMPT, conversation=oracle(exact, future), **arguments))
    monkeypatch.setattr("specdec.sequence.target_view", lambda *_: pytest.fail("another wait for the device"))
    steps = list(static.stream(PROMPT, conversation=oracle(static, future), **arguments))
    for step, reference in zip(steps, expected, strict=True):
        assert step.target is not None
        assert reference.target is not None
        np.testing.assert_allclose(step.target.probs, reference.target.probs, atol=1e-4)
        np.testing.assert_allclose(step.target.ranks, reference.target.ranks, atol=1)  # equals but for rounding
        assert step.target.next_prob == pytest.approx(reference.target.next_prob, abs=1e-4)
        assert sampled or step.target.next_rank == 0


def test_where_a_graph_cannot_be_captured_one_notice_says_so_and_the_reply_is_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True)
    static = engine.target._static
    assert static is not None

    def refused(*shape: int) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(static, "_capture", True)
    monkeypatch.setattr(static, "_captured", refused)
    with caplog.at_level(logging.WARNING):
        reply = ids(list(engine.stream(PROMPT, max_new_tokens=20)))
    assert reply == ids(list(tiny_engine().stream(PROMPT, max_new_tokens=20)))
    notices = [record.getMessage() for record in caplog.records if record.name == "specdec.static"]
    assert len(notices) == 1
    assert "not permitted" in notices[0]
    assert "\n" not in notices[0]


class Streams:
    """torch's own `torch.cuda.graph` around kernels that the CPU runs: which stream is current, and what was done on ``own``.

    With a ``refusal`` the captured pass fails in these words, and the capture's end in others, as on a GPU.
    """

    class Stream:
        device = "cuda:0"

        def wait_stream(self, other: Any) -> None: ...

    def __init__(self, static: StaticPass, monkeypatch: pytest.MonkeyPatch, refusal: str | None = None) -> None:
        self.caller, self.own, self.refusal = self.Stream(), self.Stream(), refusal
        self.current, self.told = self.caller, list[str]()
        run = static._pass

        def told(*shape: int) -> None:
            if self.current is self.own:
                self.told.append("pass")
                if self.refusal and "begin" in self.told:
                    raise RuntimeError(self.refusal)
            run(*shape)

        for name, stand_in in {
            "current_stream": lambda *_: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "_get_device_index": lambda *_: 0,
            "CUDAGraph": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", self.own)  # torch 2.8 makes one in any case
        monkeypatch.setattr("specdec.static._forget_workspaces", lambda: self.told.append("forget"))
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        for name, value in {"_capture": True, "_stream": self.own, "_pass": told}.items():
            monkeypatch.setattr(static, name, value)

    def capture_begin(self, *_: Any, capture_error_mode: str, **__: Any) -> None:
        assert capture_error_mode == "thread_local", "what other threads do is their business"
        self.told.append("begin")

    def capture_end(self) -> None:
        self.told.append("end")
        if self.refusal:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_after_a_capture_that_failed_its_cause_is_told_and_passes_run_on_the_callers_stream(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True)
    static = engine.target._static
    assert static is not None
    streams = Streams(static, monkeypatch, "operation not permitted when stream is capturing\nand more")
    with caplog.at_level(logging.WARNING):
        reply = ids(list(engine.stream(PROMPT, max_new_tokens=20)))
    assert reply == ids(list(tiny_engine().stream(PROMPT, max_new_tokens=20)))
    assert "(operation not permitted when stream is capturing)" in caplog.text
    assert streams.current is streams.caller
    assert streams.told == ["pass", "forget", "begin", "pass", "end", "forget"]


def test_a_graph_has_the_workspaces_of_cublas_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    static = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True).target._static
    assert static is not None
    streams = Streams(static, monkeypatch)
    with torch.inference_mode():
        static.slots.reserve(CONTEXT + PADDING - 1)
        static._frame(1, 1)
        static._captured(1, 1, CONTEXT + PADDING)
    assert streams.told == ["pass", "forget", "begin", "pass", "end", "forget"]
    assert streams.current is streams.caller


def test_out_of_memory_within_a_capture_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True)
    static = engine.target._static
    assert static is not None
    Streams(static, monkeypatch, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(MemoryFullError):
        list(engine.stream(PROMPT, max_new_tokens=20))
    assert static._capture, "the next reply may find room"


def test_what_a_pass_costs_is_measured_while_no_other_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, free = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer()), []
    measure = engine.target.measure_cost

    def enter() -> bool:
        if entered := engine.scheduler.lock.acquire(blocking=False):
            engine.scheduler.lock.release()
        return entered

    def watched() -> PassCost:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(enter).result())
        return measure()

    monkeypatch.setattr(engine.target, "measure_cost", watched)
    list(engine.stream(PROMPT, max_new_tokens=3))
    assert free == [False]


def test_a_padded_pass_costs_what_its_bucket_costs() -> None:
    cost = replayed().target.measure_cost(context=20, repeats=1)
    assert cost.seconds(33) == cost.seconds(64)
    assert cost.seconds(5) == cost.seconds(8)


def test_a_cpu_verifies_trees_as_they_are_unless_asked_otherwise() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    assert TargetModel(model)._static is None
    assert TargetModel(model, static=True)._static is not None


@pytest.mark.parametrize("path", PATHS)
def test_law_6_out_of_memory_ends_the_reply_in_one_line_and_the_conversation_goes_on(
    path: str, monkeypatch: pytest.MonkeyPatch, short_buckets: None
) -> None:
    engine = unmeasured(path)
    chat = engine.conversation()
    blank, room = Slab.blank, [0]

    def full(slab: Slab, capacity: int, copies: int = 1) -> Slab:
        if capacity > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return blank(slab, capacity, copies)

    monkeypatch.setattr(Slab, "blank", full)
    least = 32 if path == "exact" else 64
    for positions, said in ((least, False), (2 * least, True)):  # in the prefill; in the growth while it decodes
        room[0] = positions
        steps: list[Step] = []
        with pytest.raises(MemoryFullError) as error:
            steps.extend(engine.stream(PROMPT, conversation=chat, decoding="plain", max_new_tokens=140, eos_token_id=VOCAB))
        assert "\n" not in str(error.value)
        assert "start a new chat" in str(error.value)
        assert bool(steps) == said
        assert chat.cache.length == len(chat.token_ids)
    room[0] = 10_000
    again = ids(list(engine.stream(PROMPT + " on", conversation=chat, max_new_tokens=60)))
    assert again == ids(list(tiny_engine().stream(PROMPT + " on", max_new_tokens=60)))


def limit_memory(monkeypatch: pytest.MonkeyPatch, positions: int) -> list[int]:
    """Let the buffers of all conversations together hold so many ``positions``: a number that may be changed."""
    room = [positions]
    blank, buffers = Slab.blank, list[tuple[weakref.ref[Any], int]]()

    def full(slab: Slab, capacity: int, copies: int = 1) -> Slab:
        held = sum(positions for storage, positions in buffers if storage() is not None)
        if capacity and held + copies * capacity > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        larger = blank(slab, capacity, copies)
        buffers.append((weakref.ref(larger.keys), copies * capacity))
        return larger

    monkeypatch.setattr(Slab, "blank", full)
    return room


def unmeasured(path: str) -> SpeculativeEngine:
    """An engine that knows its pass cost, and holds nothing of what was needed to measure it."""
    engine = replayed() if path == "replayed" else SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    assert engine.pass_cost
    if engine.target._static is not None:
        slots = engine.target._static.slots
        slots.__init__(slots.blank, lambda: 0.0)  # type: ignore[misc]
    return engine


@pytest.mark.parametrize(("path", "room"), [("exact", 460), ("replayed", 700)])
def test_law_6_where_memory_runs_out_idle_conversations_give_theirs_up_and_every_reply_is_the_same(
    path: str, room: int, monkeypatch: pytest.MonkeyPatch, short_buckets: None
) -> None:
    """Where one grows, and (replayed) where one moves out of the shared buffers."""
    engine = unmeasured(path)
    asked = [(PROMPT, 20), (PROMPT, 20), (PROMPT, 140), (PROMPT + " on", 30), (PROMPT + " on", 30), (PROMPT + " on", 30)]
    arguments = [{"prompt": prompt, "max_new_tokens": tokens, "eos_token_id": VOCAB} for prompt, tokens in asked]
    expected = [ids(list(tiny_engine().stream(**each))) for each in arguments]
    limit_memory(monkeypatch, room)
    chats = [engine.conversation() for _ in range(3)]
    warm = []
    for chat, each, reply in zip(chats * 2, arguments, expected, strict=True):
        assert ids(list(engine.stream(conversation=chat, **each))) == reply
        warm.append([bool(chat.token_ids) and chat.cache.length > 0 for chat in chats])
    assert warm[1:3] == [[True, True, False], [False, False, True]]


@pytest.mark.parametrize("path", PATHS)
def test_law_6_a_conversation_that_is_streaming_gives_nothing_up(
    path: str, monkeypatch: pytest.MonkeyPatch, short_buckets: None
) -> None:
    engine = unmeasured(path)
    arguments: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": VOCAB}
    expected = ids(list(tiny_engine().stream(PROMPT, **arguments)))
    room, chat = limit_memory(monkeypatch, 10_000), engine.conversation()
    stream = engine.stream(PROMPT, conversation=chat, **arguments)
    first, held, room[0] = next(stream), chat.cache.length, 200
    with pytest.raises(MemoryFullError):
        list(engine.stream(PROMPT, max_new_tokens=140, eos_token_id=VOCAB))
    assert chat.cache.length == len(chat.token_ids) >= held > 0
    room[0] = 10_000
    assert ids([first, *stream]) == expected


def test_a_cache_that_cannot_grow_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch, short_buckets: None) -> None:
    target = tiny_engine().target
    cache: TreeCache = target.new_cache()
    target.prefill(cache, list(range(10, 22)))
    before = cache.slabs[0].keys[:, :, :12].clone()
    zeros = torch.Tensor.new_zeros
    calls = 0

    def second_fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:  # the keys found room, the values did not
            raise torch.OutOfMemoryError("out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_zeros", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        target.prefill(cache, list(range(10, 22)))
    monkeypatch.undo()
    assert [buffer.shape[2] for buffer in cache.slabs[0]] == [16, 16]
    assert torch.equal(cache.slabs[0].keys[:, :, :12], before)


def test_a_target_on_one_cuda_device_verifies_in_fixed_shapes_but_for_a_lent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, other = torch.device("cuda:0"), torch.device("cuda:1")
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    layers = [LayerShape(device, torch.float32, (1, 2), (1, 2)) for device in (gpu, gpu, other)]
    assert _is_static(gpu, layers[:2])
    assert not _is_static(gpu, layers)
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert not _is_static(gpu, layers[:2]), "no graph is captured where the GPU comes and goes"


def test_float32_products_are_exact() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_texts_that_share_passes_in_buffers_that_grow_say_what_eager_passes_say(
    dtype: torch.dtype, device: str, short_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with graphs, which are captured anew with every growth; on the CPU with recorded kernels."""
    monkeypatch.setattr(Slots, "reserve_all", lambda _: None)  # else captured passes begin with buffers of full size
    model = tiny_model(ARCHITECTURES["llama"]).to(device, dtype)
    static, exact = (SpeculativeEngine(model, tokenizer(), static=way) for way in (True, False))
    passes = static.target._static if device == "cuda" else replay_passes(static.target)
    assert passes is not None
    targets = (static.target, exact.target)
    chats = [[target.new_cache() for target in targets] for _ in range(2)]
    capacities = set()
    for turn in range(80):
        running = chats if turn > 20 else chats[:1]  # the first is alone until it has grown
        trees = [bushy(1 + (7 * turn + who) % 40, seed=2 * turn + who) for who in range(len(running))]
        passes_of = zip(targets, zip(*running, strict=True), strict=True)
        said = [target.run([Span(*text) for text in zip(caches, trees, strict=True)]) for target, caches in passes_of]
        for caches, tree, mine, reference in zip(running, trees, *said, strict=True):
            assert torch.isfinite(mine).all()
            assert (mine - reference).norm() <= TOLERANCES[dtype] * reference.norm()
            if caches[0].length < 140:
                for cache in caches:
                    cache.commit(tree.path(len(tree) - 1))
        capacities.add(passes._bound)
    assert min(cache.length for caches in chats for cache in caches) >= 140
    assert len(capacities) > 1, "buffers grew, and graphs with them"
    assert passes._capture, "capturing failed"
    arguments: dict[str, Any] = {"max_new_tokens": 140, "eos_token_id": VOCAB}
    prompts = (PROMPT, "a quite different text, a quite")
    streams = [static.stream(prompt, **arguments) for prompt in prompts]
    turns = zip(*zip_longest(*streams), strict=True)  # a step of this one, a step of that one
    replies = [[token for step in steps if step for token in step.token_ids] for steps in turns]
    assert [len(reply) for reply in replies] == [140, 140]
    if dtype == torch.float32:
        assert replies == [ids(list(exact.stream(prompt, decoding="plain", **arguments))) for prompt in prompts]


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_a_gpu_graphs_say_what_plain_decoding_and_transformers_say(architecture: str) -> None:
    model = tiny_model(ARCHITECTURES[architecture]).to("cuda")
    engine = SpeculativeEngine(model, tokenizer())
    static = engine.target._static
    assert static is not None
    prompt = tokenizer()(PROMPT)["input_ids"]
    tokens = torch.tensor([prompt], device="cuda")
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=60, pad_token_id=0)
    reference = output[0, len(prompt) :].tolist()
    for budget in (0, 7, 64):
        steps = engine.stream(prompt, max_new_tokens=60, budget=budget, conversation=oracle(engine, reference))
        assert ids(list(steps)) == reference
    assert static._capture, "capturing failed"
    assert len(static._graphs) >= len(BUCKETS)
    exact = TargetModel(model, static=False)
    for size in (1, 3, 17, 65):
        caches = engine.target.new_cache(), exact.new_cache()
        for target, cache in zip((engine.target, exact), caches, strict=True):
            target.prefill(cache, prompt)
        torch.testing.assert_close(
            engine.target.verify(caches[0], bushy(size)), exact.verify(caches[1], bushy(size)), atol=1e-4, rtol=1e-4
        )
    arguments = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 5}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))
    assert ids(list(engine.stream(PROMPT, conversation=oracle(engine, plain), budget=20, **arguments))) == plain


def tensor_bytes(device: str) -> int:
    """What is allocated on a GPU; on the CPU what the tensors hold that Python knows."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    known = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.device.type == "cpu"]
    tensors = [tensor for tensor in known if tensor.layout == torch.strided]  # oneDNN's own show no storage
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(("device", "replies"), [("cpu", 40), pytest.param("cuda", 200, marks=pytest.mark.cuda)])
def test_memory_does_not_grow_over_many_replies(device: str, replies: int) -> None:
    """Not from the first half to the second, which asks the same: new chats and one that goes on, greedy and sampled."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]).to(device), tokenizer(), static=True)
    if device == "cpu":
        replay_passes(engine.target)
    chat, held = engine.conversation(), []
    for number in range(replies):
        arguments: dict[str, Any] = {"max_new_tokens": 20, "budget": 7, "do_sample": number % 2 == 1}
        conversation = chat if number % 5 == 0 else engine.conversation()
        list(engine.stream(f"{number % 10} {PROMPT}", conversation=conversation, **arguments))
        if number + 1 in (replies // 2, replies):
            held.append(tensor_bytes(device))
    assert held[1] <= held[0]


@pytest.mark.cuda
def test_on_a_gpu_a_step_waits_once_for_the_device() -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]).to("cuda"), tokenizer())
    list(engine.stream(PROMPT, max_new_tokens=60))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for arguments in (
            {},
            {"details": True},
            {"do_sample": True, "temperature": 0.8, "top_k": 40, "details": True},
            {"do_sample": True, "repetition_penalty": 1.1, "presence_penalty": 0.5, "top_p": 0.8},
        ):
            stream = engine.stream(PROMPT, max_new_tokens=20, eos_token_id=VOCAB, **arguments)
            next(stream)
            with pytest.warns(UserWarning, match="synchroniz") as waits:
                steps = list(stream)
            assert len(waits) <= len(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_on_a_gpu_a_round_over_several_texts_waits_once_for_the_device() -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]).to("cuda"), tokenizer())
    engine.target.prepare(CONTEXT, texts=4)
    caches = begun(engine.target, LENGTHS[:4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for size in (1, 9, 40):
            for logits in engine.target.run([Span(cache, bushy(size)) for cache in caches]):
                assert logits.shape[0] == size
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.target._static is not None
    assert engine.target._static._capture, "capturing failed"
