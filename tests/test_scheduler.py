"""Many texts, one pass: each says what it says alone, what was reused equals a fresh prefill, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from toys import ARCHITECTURES, PATHS, VOCAB, OracleSpeculator, count_what_is_read, tiny_engine, tiny_model, tokenizer
from transformers import LogitsProcessorList

from specdec.conversation import LEAST_SHARED, Conversation, ConversationBusyError
from specdec.cost import PassCost
from specdec.engine import SpeculativeEngine
from specdec.errors import MemoryFullError
from specdec.request import resolve
from specdec.scheduler import LEAST_CHUNK, Scheduler
from specdec.sequence import Sequence
from specdec.target import Span
from specdec.tree import TokenTree

PROMPTS = ("the cat sat on the mat. the cat sat", "a quite different text, a quite", "one, two, one, two, one", "x")
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"decoding": "plain"},
    {"do_sample": True, "seed": 7, "temperature": 0.9},
    {"do_sample": True, "seed": 7, "temperature": 1.3, "top_k": 30, "repetition_penalty": 1.3, "budget": 9},
    {"decoding": "linear", "no_repeat_ngram_size": 3},
)


def submit(engine: SpeculativeEngine, prompt: Any, chat: Conversation | None = None, **arguments: Any) -> Sequence:
    request = resolve(engine.model, engine.tokenizer, engine.target.context_limit, prompt, **arguments)
    return engine.scheduler.submit(request, chat or engine.conversation())


def take(sequence: Sequence) -> list[int]:
    """The tokens of the steps that are there, which are thereby taken."""
    tokens: list[int] = []
    while sequence.steps:
        tokens += sequence.steps.popleft().token_ids
    return tokens


def finish(engine: SpeculativeEngine, sequences: list[Sequence]) -> list[list[int]]:
    """Run rounds until all have ended; what each said."""
    said: list[list[int]] = [[] for _ in sequences]
    while not all(sequence.ended for sequence in sequences):
        assert engine.scheduler.step()
        for tokens, sequence in zip(said, sequences, strict=True):
            tokens += take(sequence)
    return said


def alone(engine: SpeculativeEngine, prompt: Any, **arguments: Any) -> list[int]:
    return [token for step in engine.stream(prompt, **arguments) for token in step.token_ids]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_law_7_a_text_is_the_same_alone_and_in_any_company(architecture: str, path: str) -> None:
    engine = tiny_engine(architecture, path)
    asked = [(prompt, {"max_new_tokens": 20 + 5 * i, **WAYS[i % len(WAYS)]}) for i, prompt in enumerate(PROMPTS * 2)]
    expected = [alone(engine, prompt, **arguments) for prompt, arguments in asked]
    sequences = [submit(engine, prompt, **arguments) for prompt, arguments in asked]
    assert finish(engine, sequences) == expected
    assert not engine.scheduler.sequences


@pytest.mark.parametrize("path", PATHS)
def test_law_7_holds_whoever_joins_leaves_is_cancelled_or_fails_beside_it(path: str) -> None:
    engine = tiny_engine(path=path)
    expected = alone(engine, PROMPTS[0], max_new_tokens=40)
    kept, cancelled = submit(engine, PROMPTS[0], max_new_tokens=40), [False]
    others = [
        submit(engine, PROMPTS[1], max_new_tokens=40, cancelled=lambda: cancelled[0]),
        submit(engine, PROMPTS[2], max_new_tokens=40, logits_processor=LogitsProcessorList([failing])),
    ]
    said: list[int] = []
    for turn in range(60):
        engine.scheduler.step()
        said += take(kept)
        for other in others:
            take(other)
        match turn:
            case 2:
                others.append(submit(engine, PROMPTS[3], max_new_tokens=30))
            case 4:
                cancelled[0] = True
            case 6:
                engine.scheduler.drop(others[2])
        if kept.ended:
            break
    assert said == expected
    assert isinstance(others[1].error, ZeroDivisionError)
    assert [other.finish_reason for other in others] == ["cancelled", None, None]
    assert not engine.scheduler.sequences


def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a processor of the caller's")


def test_one_forward_verifies_all_texts_and_a_prompt_is_read_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    assert engine.target.packs
    monkeypatch.setattr(engine.target, "measure_cost", lambda: PassCost({1: 1.0, 64: 3.0}))
    sequences = [submit(engine, prompt, max_new_tokens=60, eos_token_id=VOCAB) for prompt in PROMPTS[:3]]
    for _ in range(2):
        engine.scheduler.step()
    widths: list[int] = []
    forward = engine.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", counted)
    for sequence in sequences:
        take(sequence)
    late = submit(engine, "z" * 100, max_new_tokens=5)
    before = [sequence.emitted for sequence in sequences]
    engine.scheduler.step()
    assert len(widths) == 1
    assert widths[0] >= len(sequences) + LEAST_CHUNK
    assert all(sequence.emitted > emitted for sequence, emitted in zip(sequences, before, strict=True))
    assert 0 < late.chat.cache.length < 99


def test_a_pass_that_fails_is_run_for_each_text_alone_and_only_who_fails_alone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    expected = alone(engine, PROMPTS[0], max_new_tokens=20)
    good, bad = (submit(engine, prompt, max_new_tokens=20) for prompt in PROMPTS[:2])
    run = engine.target.run

    def refusing(spans: list[Span]) -> list[torch.Tensor]:
        if any(span.cache is bad.chat.cache for span in spans):
            raise torch.OutOfMemoryError("out of memory")
        return run(spans)

    monkeypatch.setattr(engine.target, "run", refusing)
    assert finish(engine, [good, bad]) == [expected, []]
    assert isinstance(bad.error, MemoryFullError)


def test_a_text_takes_part_in_no_pass_before_its_last_step_was_taken() -> None:
    engine = tiny_engine()
    slow, fast = (submit(engine, prompt, max_new_tokens=30, budget=0, eos_token_id=VOCAB) for prompt in PROMPTS[:2])
    for _ in range(10):
        engine.scheduler.step()
        take(fast)
    assert (slow.emitted, len(slow.steps)) == (1, 1)
    assert fast.emitted > 5
    for sequence in (slow, fast):
        engine.scheduler.drop(sequence)


def test_the_nodes_of_all_texts_compete_under_the_cost_of_the_whole_width() -> None:
    cost = PassCost({1: 1.0, 2: 1.2, 64: 1.2 + 62 * 0.2}, each=0.1)
    trees = [np.array([1, 0.9, 0.5, 0.05]), np.array([1, 0.3, 0.2]), np.array([1, 0.8])]
    for others in (0, 5):
        shares = cost.share(trees, width=others, expected=float(others), sequences=3 + others)
        best = max(
            (
                (sum(tree[:n].sum() for tree, n in zip(trees, counts, strict=True)) + others)
                / float(cost.seconds(sum(counts) + others, 3 + others)),
                counts,
            )
            for counts in np.ndindex(5, 4, 3)
            if all(1 <= n <= len(tree) for n, tree in zip(counts, trees, strict=True))
        )
        assert tuple(shares) == best[1]
    full = PassCost({1: 1.0, 64: 64.0})
    assert full.share(trees, sequences=3) == [1, 1, 1], "where every node costs a pass, none is drafted"


def test_what_a_text_adds_to_a_pass_is_measured() -> None:
    cost = tiny_engine().target.measure_cost(context=20, repeats=2)
    assert float(cost.seconds(8, sequences=4)) >= float(cost.seconds(8))


@pytest.mark.parametrize("path", PATHS)
def test_law_8_a_reply_behind_a_copied_prefix_is_that_behind_a_fresh_prefill(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(path=path)
    system = "You are a helpful cat who answers in few words. "
    prompts = [system + question for question in ("What is up?", "What is down?", "Whatever else?")]
    expected = [alone(engine, prompt, max_new_tokens=25) for prompt in prompts]
    read = count_what_is_read(monkeypatch)
    assert finish(engine, [submit(engine, prompts[0], owner="me", max_new_tokens=25)]) == expected[:1]
    assert sum(read) == len(prompts[0]) - 1
    read.clear()
    assert finish(engine, [submit(engine, p, owner="me", max_new_tokens=25) for p in prompts[1:]]) == expected[1:]
    assert sum(read) < 2 * (len(prompts[1]) - len(system)), "what they share with the first is not read again"
    engine.scheduler.prefixes.forget(owner="me")


@pytest.mark.parametrize("path", PATHS)
def test_a_system_prompt_that_eight_chats_share_is_read_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they come all at once: the others wait while the first reads it."""
    engine = tiny_engine(path=path)
    messages = [{"role": "system", "content": "You are a cat. " * 5}, {"role": "user", "content": "?"}]
    asked = [[messages[0], {"role": "user", "content": f"{number}: what?"}] for number in range(8)]
    expected = [alone(engine, each, max_new_tokens=8) for each in asked]
    read = count_what_is_read(monkeypatch)
    sequences = [submit(engine, each, owner="me", max_new_tokens=8) for each in asked]
    whole = len(sequences[0].request.prompt.token_ids)
    assert finish(engine, sequences) == expected
    assert sum(read) < whole + 7 * 40
    assert all(sequence.reused > 75 for sequence in sequences[1:])
    engine.scheduler.prefixes.forget(owner="me")


def test_between_owners_only_what_is_common_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    text = "nothing of this may betray what somebody else has asked"
    for owners, shared in ((("a", "a"), True), (("a", "b"), False), ((None, None), False), (("a", None), False)):
        read = count_what_is_read(monkeypatch)
        for owner in owners:
            finish(engine, [submit(engine, text, owner=owner, max_new_tokens=3)])
        assert (sum(read) < 2 * len(text) - LEAST_SHARED) is shared
        for owner in owners:
            engine.scheduler.prefixes.forget(owner=owner)
        monkeypatch.undo()


def test_kept_prefixes_stay_within_their_limit_and_the_least_recently_used_goes_first() -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    prefixes = engine.scheduler.prefixes
    finish(engine, [submit(engine, "first " * 9, owner="me", max_new_tokens=2)])
    prefixes.limit = 2.5 * prefixes.nbytes
    for number in range(6):
        finish(engine, [submit(engine, f"{number} " * 20, owner="me", max_new_tokens=2)])
        again = submit(engine, "first " * 9, owner="me", max_new_tokens=2)
        finish(engine, [again])
        assert again.reused > 40, "used again and again, it stays"
        assert prefixes.nbytes <= prefixes.limit
    prefixes.forget(owner="me")
    gc.collect()
    assert prefixes.nbytes == 0


def test_a_conversation_is_busy_until_its_text_has_ended() -> None:
    engine = tiny_engine()
    chat = engine.conversation()
    running = submit(engine, PROMPTS[0], chat, max_new_tokens=10)
    with pytest.raises(ConversationBusyError):
        submit(engine, PROMPTS[0], chat, max_new_tokens=10)
    engine.scheduler.drop(running)
    finish(engine, [submit(engine, PROMPTS[0], chat, max_new_tokens=10)])


class Histories(RuleBasedStateMachine):
    """Law 9: after any history of submits, rounds, cancels, failures, rewinds and evictions nothing is held any more."""

    @initialize(path=st.sampled_from(PATHS))
    def begin(self, path: str) -> None:
        self.engine = tiny_engine(path=path)
        self.scheduler: Scheduler = self.engine.scheduler
        self.running: list[tuple[Sequence, list[int], list[int]]] = []
        self.chats = [self.engine.conversation() for _ in range(3)]

    @rule(
        prompt=st.sampled_from(PROMPTS),
        way=st.sampled_from(WAYS),
        owner=st.sampled_from([None, "a", "b"]),
        chat=st.integers(0, 5),
    )
    def submit(self, prompt: str, way: dict[str, Any], owner: str | None, chat: int) -> None:
        arguments = {"max_new_tokens": 12, **way}
        conversation = self.chats[chat] if chat < 3 and not self.chats[chat].text.busy else None
        expected = alone_once(prompt, repr(sorted(arguments.items())), arguments)
        self.running.append((submit(self.engine, prompt, conversation, owner=owner, **arguments), [], expected))

    @rule(rounds=st.integers(1, 6))
    def step(self, rounds: int) -> None:
        for _ in range(rounds):
            self.scheduler.step()
            for sequence, said, expected in self.running:
                said += take(sequence)
                assert said == expected[: len(said)]
                assert not sequence.ended or sequence.error is not None or said == expected
        self.running = [each for each in self.running if not each[0].ended]

    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        if self.running:
            self.scheduler.drop(self.running.pop(which % len(self.running))[0])

    @rule(which=st.integers(0, 9))
    def fail(self, which: int) -> None:
        """The speculator of one breaks down at its next proposal."""
        if self.running:
            sequence = self.running[which % len(self.running)][0]
            if sequence.request.decoding != "plain":
                sequence.chat.speculator = Broken([], 0)
                self.chats = [self.engine.conversation() if chat is sequence.chat else chat for chat in self.chats]

    @rule()
    def evict(self) -> None:
        self.scheduler.prefixes.cool()

    @invariant()
    def caches_hold_their_tokens(self) -> None:
        for sequence, _, _ in getattr(self, "running", []):
            assert sequence.chat.cache.length == len(sequence.chat.token_ids)

    def teardown(self) -> None:
        for sequence, _, _ in getattr(self, "running", []):
            self.scheduler.drop(sequence)
        assert not self.scheduler.sequences
        assert not any(chat.text.busy for chat in self.chats)
        self.scheduler.prefixes.cool()
        del self.chats, self.running
        gc.collect()
        assert self.scheduler.prefixes.nbytes == 0


class Broken(OracleSpeculator):
    def propose(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a speculator of the caller's")


_known: dict[tuple[str, str], list[int]] = {}


def alone_once(prompt: str, key: str, arguments: dict[str, Any]) -> list[int]:
    if (prompt, key) not in _known:
        _known[prompt, key] = alone(tiny_engine(), prompt, **arguments)
    return _known[prompt, key]


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_packed_logits_are_those_of_each_text_alone() -> None:
    target = tiny_engine().target
    spans = []
    for length, tree in ((0, TokenTree.chain([5, 6, 7])), (9, TokenTree.root(8)), (20, TokenTree.chain([9, 10]))):
        cache = target.new_cache()
        target.prefill(cache, list(range(10, 10 + length)))
        spans.append(Span(cache, tree, logits=length != 9))
    apart = [target.run([span])[0].clone() for span in spans]
    together = target.run(spans)
    assert [len(rows) for rows in together] == [3, 0, 2]
    for mine, reference in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_other_visitors_start_from_the_system_prompt_and_never_from_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    system = {"role": "system", "content": "You are a cat. " * 5}
    said = "a secret that is long enough to be worth a copy"
    chats = {who: [system, {"role": "user", "content": said}] for who in ("a", "b")}
    first, second = (submit_and_finish(engine, messages, owner=who) for who, messages in chats.items())
    other = submit_and_finish(engine, [system, {"role": "user", "content": "something else"}], owner="b")
    assert first.reused == 0
    assert second.reused == other.reused == first.request.prompt.common
    assert (
        tokenizer().decode(first.request.prompt.token_ids[: second.reused]) == f"<|system|>{system['content']}<|end|><|user|>"
    )
    for who in chats:
        engine.scheduler.prefixes.forget(owner=who)


def submit_and_finish(engine: SpeculativeEngine, prompt: Any, **arguments: Any) -> Sequence:
    sequence = submit(engine, prompt, max_new_tokens=3, **arguments)
    finish(engine, [sequence])
    return sequence


def test_law_7_holds_where_the_model_is_made_to_attend_otherwise_later_on() -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    assert engine.target.packs
    engine.model.set_attn_implementation("eager")
    assert not engine.target.packs
    expected = [alone(engine, prompt, max_new_tokens=20) for prompt in PROMPTS[:2]]
    assert finish(engine, [submit(engine, prompt, max_new_tokens=20) for prompt in PROMPTS[:2]]) == expected
