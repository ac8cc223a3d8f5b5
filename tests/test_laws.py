"""The laws of the engine, on tiny random models of every architecture of the matrix, in float32.

Speculation never changes what the target says; a stop holds exactly where it falls; a conversation survives anything.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from toys import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    PATHS,
    VOCAB,
    OracleSpeculator,
    count_what_is_read,
    replay_passes,
    tiny_engine,
    tiny_model,
    tokenizer,
)
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from specdec.accept import Verdict
from specdec.conversation import Conversation, ConversationBusyError
from specdec.engine import SpeculativeEngine
from specdec.errors import NotANumberError
from specdec.logits import target_view
from specdec.request import RequestError
from specdec.sampling import PresencePenaltyProcessor
from specdec.sequence import Sequence
from specdec.speculators import Proposal
from specdec.step import Step
from specdec.tree import TokenTree

PROMPT = "the cat sat on the mat. the cat sat"
DECODINGS = ("plain", "linear", "tree")
SETTINGS: dict[str, dict[str, Any]] = {
    "cool": {"temperature": 0.5, "top_p": 0.9},
    "even": {"temperature": 0.9, "top_k": 40, "min_p": 0.05},
    "warm": {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.3},
    "varied": {"temperature": 0.9, "top_k": 0, "frequency_penalty": 0.6},
    "hot": {"temperature": 1.5, "top_k": 0, "min_p": 0.02, "presence_penalty": 0.7, "no_repeat_ngram_size": 3},
}


def ids(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def oracle(engine: SpeculativeEngine, future: list[int], seed: int = 1, honesty: float = 0.8) -> Conversation:
    chat = engine.conversation()
    chat.speculator = OracleSpeculator(future, seed, honesty)
    return chat


def transformers_greedy(engine: SpeculativeEngine, prompt: list[int], **arguments: Any) -> list[int]:
    output = engine.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, pad_token_id=EOS, **arguments
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_law_1_greedy_tree_linear_plain_and_transformers_agree(architecture: str, path: str) -> None:
    engine = tiny_engine(architecture, path)
    prompt = tokenizer()(PROMPT)["input_ids"]
    reference = transformers_greedy(engine, prompt, max_new_tokens=60)
    assert len(set(reference)) > 3, "a reply of one repeated token would prove little"
    for decoding in DECODINGS:
        assert ids(list(engine.stream(prompt, max_new_tokens=60, decoding=decoding, do_sample=False))) == reference
    for budget in (1, 7, 40):
        steps = list(engine.stream(prompt, max_new_tokens=60, budget=budget, conversation=oracle(engine, reference)))
        assert ids(steps) == reference
        assert len(steps) < 60, "the oracle's tokens must be accepted"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_law_2_sampled_tree_linear_and_plain_agree(architecture: str, name: str, path: str) -> None:
    engine = tiny_engine(architecture, path)
    arguments = {"max_new_tokens": 50, "do_sample": True, "seed": 7, **SETTINGS[name]}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))
    for decoding in ("linear", "tree"):
        assert ids(list(engine.stream(PROMPT, decoding=decoding, **arguments))) == plain
        steps = list(engine.stream(PROMPT, decoding=decoding, conversation=oracle(engine, plain), budget=20, **arguments))
        assert ids(steps) == plain
        assert len(steps) < len(plain)
    other = ids(list(engine.stream(PROMPT, decoding="plain", **{**arguments, "seed": 8})))
    assert other != plain


@pytest.mark.parametrize("path", PATHS)
def test_law_2_greedy_with_penalties_agrees_with_transformers(path: str) -> None:
    engine = tiny_engine(path=path)
    prompt = tokenizer()(PROMPT)["input_ids"]
    arguments: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 9}
    arguments |= {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    presence = LogitsProcessorList([PresencePenaltyProcessor(0.9, len(prompt))])
    reference = transformers_greedy(engine, prompt, **arguments, logits_processor=presence)
    for decoding in DECODINGS:
        steps = list(engine.stream(prompt, decoding=decoding, do_sample=False, presence_penalty=0.9, **arguments))
        assert ids(steps) == reference
    chat = oracle(engine, reference)
    assert ids(list(engine.stream(prompt, conversation=chat, presence_penalty=0.9, **arguments))) == reference


def test_law_2_what_generate_asks_of_the_prompt_and_a_config_object_count_too() -> None:
    engine = tiny_engine()
    prompt = tokenizer()(PROMPT)["input_ids"]
    arguments: dict[str, Any] = {"max_new_tokens": 40, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}
    reference = transformers_greedy(engine, prompt, **arguments)
    assert reference != transformers_greedy(engine, prompt, max_new_tokens=40)
    assert ids(list(engine.stream(prompt, do_sample=False, **arguments))) == reference
    config = GenerationConfig(do_sample=False, **arguments)
    assert ids(list(engine.stream(prompt, generation_config=config))) == reference


def test_law_2_a_presence_penalty_acts_before_temperature_and_top_k() -> None:
    engine = tiny_engine()
    arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.5, "eos_token_id": VOCAB}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", top_k=1, **arguments)))
    assert len(set(plain)) < 40
    unique = ids(list(engine.stream(PROMPT, decoding="plain", top_k=1, presence_penalty=1e4, **arguments)))
    assert len(set(unique)) == 40, "no token comes twice"


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), honesty=st.floats(0, 1), budget=st.integers(0, 64), sampled=st.booleans())
def test_law_3_no_proposal_changes_the_output(seed: int, honesty: float, budget: int, sampled: bool, path: str) -> None:
    engine = tiny_engine(path=path)
    arguments = {"max_new_tokens": 30, "do_sample": sampled, "temperature": 0.8, "seed": 3}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))
    chat = oracle(engine, plain, seed, honesty)
    steps = list(engine.stream(PROMPT, conversation=chat, budget=budget, **arguments))
    assert ids(steps) == plain
    for step in steps:
        step.tree.check(VOCAB)


def mangled(tree: TokenTree, how: str) -> TokenTree:
    """``tree``, no longer fit to be verified."""
    token_ids, parents = tree.token_ids.copy(), tree.parents.copy()
    match how:
        case "stale":
            token_ids[0] += 1
        case "alien":
            token_ids[-1] = VOCAB
        case "duplicate":
            token_ids, parents = np.append(token_ids, token_ids[-1]), np.append(parents, parents[-1])
        case "cyclic":
            parents[-1] = len(parents) - 1
        case "large":
            more = np.arange(100)
            token_ids, parents = np.append(token_ids, more), np.append(parents, len(token_ids) - 1 + more)
    return TokenTree(token_ids, parents)


@pytest.mark.parametrize("how", ["stale", "alien", "duplicate", "cyclic", "large"])
def test_law_3_what_is_no_tree_for_the_text_is_not_verified(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=30)))
    chat = oracle(engine, plain)
    propose = chat.speculator.propose
    monkeypatch.setattr(chat.speculator, "propose", lambda request: Proposal(mangled(propose(request).tree, how)))
    steps = list(engine.stream(PROMPT, conversation=chat, budget=8, max_new_tokens=30))
    assert ids(steps) == plain
    assert {len(step.tree) for step in steps} == {1}
    assert "no tree for this text" in str(steps[0].note)


def test_a_step_that_drafts_nothing_says_why_unless_none_was_asked_for() -> None:
    engine = tiny_engine()

    def notes(**arguments: Any) -> list[str | None]:
        steps = list(engine.stream(PROMPT, **arguments))
        assert arguments.get("decoding") == "plain" or all((step.note is None) == (len(step.tree) > 1) for step in steps)
        return [step.note for step in steps]

    assert set(notes(decoding="plain", max_new_tokens=5)) == {None}
    assert notes(budget=8, max_new_tokens=1) == ["draft inactive: only one more token is wanted"]
    assert "draft inactive: the node budget is 0" in notes(budget=0, max_new_tokens=5)


@pytest.mark.parametrize("path", PATHS)
def test_law_4_a_conversation_after_many_turns_holds_what_a_fresh_prefill_computes(path: str) -> None:
    engine = tiny_engine(path=path)
    chat = engine.conversation()
    messages = [{"role": "user", "content": "hello hello hello"}]
    for turn in range(3):
        reply = engine.generate(messages, conversation=chat, max_new_tokens=12)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"and {turn}?"}]
    fresh = engine.target.new_cache()
    engine.target.prefill(fresh, chat.token_ids)
    assert fresh.length == chat.cache.length
    for kept, recomputed in zip(chat.cache.slabs[0], fresh.slabs[0], strict=True):
        torch.testing.assert_close(kept[:, :, : fresh.length], recomputed[:, :, : fresh.length], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_law_5_budget_0_is_plain_decoding(path: str) -> None:
    engine = tiny_engine(path=path)
    steps = list(engine.stream(PROMPT, max_new_tokens=20, budget=0))
    assert len(steps) == 20
    assert all(len(step.tree) == 1 and len(step.token_ids) == 1 for step in steps)


@pytest.mark.parametrize("cut", range(1, 12))
def test_law_5_every_stop_holds_in_the_middle_of_an_accepted_path(cut: int) -> None:
    engine = tiny_engine()
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=30)))
    stop = plain[cut - 1]
    first = plain.index(stop) + 1

    class StopAt(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids[:, -1] == stop

    ways: list[tuple[str, int, dict[str, Any]]] = [
        ("length", cut, {"max_new_tokens": cut}),
        ("eos", first, {"max_new_tokens": 30, "eos_token_id": [VOCAB - 1, stop]}),
        ("stopping_criteria", first, {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([StopAt()])}),
    ]
    for reason, length, arguments in ways:
        chat = oracle(engine, plain, honesty=1.0)
        steps = list(engine.stream(PROMPT, conversation=chat, budget=40, **arguments))
        assert ids(steps) == plain[:length]
        assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + [reason]
        prompt = tokenizer()(PROMPT)["input_ids"]
        assert chat.token_ids == (prompt + plain[:length])[:-1], "nothing after the stop is cached, nor the last token"
        assert chat.cache.length == len(chat.token_ids)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampled", [False, True])
def test_law_5_no_processor_sees_a_text_behind_an_end_token(sampled: bool, path: str) -> None:
    engine = tiny_engine(path=path)
    arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": sampled}
    end = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))[25]
    first = len(tokenizer()(PROMPT)["input_ids"])

    def matcher(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert end not in input_ids[0, first:].tolist(), "the text has ended"
        return scores

    arguments |= {"eos_token_id": end, "logits_processor": LogitsProcessorList([matcher])}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))
    assert plain[-1] == end
    steps = list(engine.stream(PROMPT, conversation=oracle(engine, plain, honesty=1.0), budget=40, **arguments))
    assert ids(steps) == plain
    assert steps[-1].finish_reason == "eos"
    assert steps[-1].tree.token_ids[steps[-1].verdict.path[-1]] == end, "the end was drafted and accepted"


@pytest.mark.parametrize("decoding", DECODINGS)
def test_law_5_a_stop_string_across_token_borders_ends_the_text_with_it(decoding: str) -> None:
    engine = tiny_engine()
    whole = engine.generate(PROMPT, decoding="plain", max_new_tokens=60)
    readable = next(i for i in range(5, len(whole) - 3) if whole[i : i + 3].isprintable() and "\ufffd" not in whole[i : i + 3])
    stop = whole[readable : readable + 3]
    steps = list(engine.stream(PROMPT, decoding=decoding, max_new_tokens=60, stop_strings=[stop, "never to be said"]))
    assert "".join(step.text for step in steps) == whole[: whole.index(stop) + 3]
    assert steps[-1].finish_reason == "stop_string"


def test_law_5_a_special_token_as_a_stop_string_ends_the_reply() -> None:
    engine = tiny_engine()
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=60, eos_token_id=VOCAB)))
    bias = {(tokenizer().convert_tokens_to_ids("<|user|>"),): 100.0}
    steps = list(
        engine.stream(PROMPT, max_new_tokens=60, sequence_bias=bias, stop_strings=["<|user|>", "no"], eos_token_id=VOCAB)
    )
    assert len(plain) == 60
    assert [len(ids(steps)), steps[-1].finish_reason] == [1, "eos"]


def test_law_5_the_time_limit_ends_the_reply() -> None:
    steps = list(tiny_engine().stream(PROMPT, max_new_tokens=150, max_time=0.0, eos_token_id=VOCAB))
    assert [len(steps), steps[-1].finish_reason] == [1, "stopping_criteria"]


@pytest.mark.parametrize("sampled", [False, True])
def test_law_5_a_path_deeper_than_the_tokens_wanted_is_cut(sampled: bool) -> None:
    engine = tiny_engine()
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=40, do_sample=sampled)))
    chat = oracle(engine, plain, honesty=1.0)
    steps = list(engine.stream(PROMPT, conversation=chat, budget=40, max_new_tokens=3, do_sample=sampled))
    assert ids(steps) == plain[:3]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_law_5_the_context_limit_ends_the_reply(decoding: str, path: str) -> None:
    engine = tiny_engine(path=path)
    prompt = [5 + i % 200 for i in range(CONTEXT - 20)]
    steps = list(engine.stream(prompt, decoding=decoding, eos_token_id=-1))
    assert len(ids(steps)) == 20
    assert steps[-1].finish_reason == "context"


@pytest.mark.parametrize("path", PATHS)
def test_law_6_a_stream_closed_half_way_leaves_the_conversation_usable(path: str) -> None:
    engine = tiny_engine(path=path)
    chat = engine.conversation()
    stream = engine.stream(PROMPT, conversation=chat, max_new_tokens=40)
    list(islice(stream, 3))
    stream.close()
    again = ids(list(engine.stream(PROMPT + " on", conversation=chat, max_new_tokens=25)))
    assert again == ids(list(engine.stream(PROMPT + " on", max_new_tokens=25)))


def test_law_6_a_failed_pass_leaves_the_conversation_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    chat = engine.conversation()
    forward, calls = engine.model.forward, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        output = forward(*args, **kwargs)
        if calls == 5:
            raise RuntimeError("out of memory, say")
        return output

    monkeypatch.setattr(engine.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.stream(PROMPT, conversation=chat, max_new_tokens=40))
    assert calls == 5
    again = ids(list(engine.stream(PROMPT + " on", conversation=chat, max_new_tokens=25)))
    assert again == ids(list(engine.stream(PROMPT + " on", max_new_tokens=25)))


def test_law_6_cancelling_ends_the_reply_within_one_step_and_keeps_what_was_said() -> None:
    engine = tiny_engine()
    chat = engine.conversation()
    steps: list[Step] = []
    for step in engine.stream(PROMPT, conversation=chat, max_new_tokens=60, cancelled=lambda: len(steps) >= 3):
        steps.append(step)
    assert len(steps) == 4
    assert steps[-1].finish_reason == "cancelled"
    assert not list(engine.stream(PROMPT + " on", conversation=chat, max_new_tokens=5, cancelled=lambda: True))
    assert len(ids(list(engine.stream(PROMPT, conversation=chat, max_new_tokens=5)))) == 5


@pytest.mark.parametrize("path", PATHS)
def test_law_6_weights_that_changed_are_read_anew(path: str) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=path == "replayed")
    if path == "replayed":
        replay_passes(engine.target)
    chat = engine.conversation()
    before = ids(list(engine.stream(PROMPT, conversation=chat, max_new_tokens=20)))
    other = tiny_model(ARCHITECTURES["llama"], seed=5).state_dict()
    for assign in (False, True):  # written to in place, or exchanged
        engine.model.load_state_dict({name: weight * (1 + assign) for name, weight in other.items()}, assign=assign)
        after = ids(list(engine.stream(PROMPT, max_new_tokens=20)))
        assert after != before
        assert ids(list(engine.stream(PROMPT, conversation=chat, max_new_tokens=20))) == after
        before = after


@pytest.mark.parametrize("path", PATHS)
def test_law_6_adapters_that_were_switched_are_read_anew(path: str) -> None:
    def lora(seed: int) -> LoraConfig:
        torch.manual_seed(seed)
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    model = get_peft_model(tiny_model(ARCHITECTURES["llama"]), lora(1), "one")
    model.add_adapter("two", lora(2))
    model.set_adapter("two")
    engine = SpeculativeEngine(model.eval(), tokenizer(), static=path == "replayed")
    if path == "replayed":
        replay_passes(engine.target)
    chat, prompt = engine.conversation(), tokenizer()(PROMPT)["input_ids"]

    def scale() -> None:
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.set_scale("two", 0.25)

    seen = []
    switches = [
        lambda: None,
        model.disable_adapter_layers,
        model.enable_adapter_layers,
        lambda: model.set_adapter("one"),
        scale,
    ]
    for switch in [*switches, lambda: model.set_adapter("two")]:
        switch()
        reply = ids(list(engine.stream(prompt, conversation=chat, max_new_tokens=20)))
        assert reply == ids(list(engine.stream(prompt, max_new_tokens=20)))
        assert reply == transformers_greedy(engine, prompt, max_new_tokens=20)
        seen.append(reply)
    with_two, without, with_two_again, with_one, with_one_still, with_two_scaled = map(tuple, seen)
    assert (with_two, with_one) == (with_two_again, with_one_still)
    assert len({with_two, without, with_one, with_two_scaled}) == 4


def test_a_conversation_of_another_engine_is_refused() -> None:
    with pytest.raises(RequestError, match="of another engine"):
        tiny_engine("llama").stream(PROMPT, conversation=tiny_engine("gpt2").conversation())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "arguments",
    [{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}],
    ids=["greedy", "sampled", "sampled by node", "by node"],
)
def test_logits_that_are_no_numbers_end_the_reply_in_one_line(path: str, arguments: dict[str, Any]) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=path == "replayed")
    torch.nn.init.constant_(engine.model.lm_head.weight, torch.nan)
    for decoding in DECODINGS:
        with pytest.raises(NotANumberError, match=rf"^the logits of {engine.name} are not numbers .*float32: .*") as caught:
            list(engine.stream(PROMPT, decoding=decoding, max_new_tokens=5, **arguments))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
def test_law_6_a_conversation_goes_on_once_its_models_weights_are_numbers_again(path: str) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=path == "replayed")
    chat, expected = engine.conversation(), ids(list(engine.stream(PROMPT, max_new_tokens=20)))
    weight = engine.model.model.layers[0].self_attn.k_proj.weight
    sound = weight.detach().clone()
    torch.nn.init.constant_(weight, torch.nan)
    with pytest.raises(NotANumberError):
        list(engine.stream(PROMPT + " and much more of it", conversation=chat, max_new_tokens=20))
    with torch.no_grad():
        weight.copy_(sound)
    assert ids(list(engine.stream(PROMPT, conversation=chat, max_new_tokens=20))) == expected


def test_the_targets_view_is_numbers_where_a_rejected_node_has_none() -> None:
    tree = TokenTree(np.array([5, 6, 7], np.int64), np.array([-1, 0, 1], np.int64))
    logits = torch.randn(3, VOCAB)
    logits[1] = torch.nan
    view = target_view(logits, tree, Verdict((0,), 9, "recovered"))
    assert np.isfinite(view.probs).all()
    assert view.next_prob == pytest.approx(float(logits[0].softmax(-1)[9]))


def test_a_conversation_serves_one_reply_at_a_time() -> None:
    engine = tiny_engine()
    chat = engine.conversation()
    running = engine.stream(PROMPT, conversation=chat, max_new_tokens=10)
    next(running)
    with pytest.raises(ConversationBusyError):
        next(engine.stream(PROMPT, conversation=chat, max_new_tokens=10))
    assert len(list(running)) > 0


@pytest.mark.parametrize("path", PATHS)
def test_two_conversations_interleaved_do_not_mix(path: str) -> None:
    engine = tiny_engine(path=path)
    prompts = [PROMPT, "a quite different text, a quite"]
    alone = [ids(list(engine.stream(p, max_new_tokens=30))) for p in prompts]
    streams = [engine.stream(p, max_new_tokens=30) for p in prompts]
    mixed: list[list[int]] = [[], []]
    while any(len(m) < len(a) for m, a in zip(mixed, alone, strict=True)):
        for stream, out in zip(streams, mixed, strict=True):
            if (step := next(stream, None)) is not None:
                out.extend(step.token_ids)
    assert mixed == alone


@pytest.mark.parametrize("path", PATHS)
def test_two_conversations_in_two_threads_do_not_mix(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(path=path)
    prompts = [PROMPT, "a quite different text, a quite"]
    alone = [ids(list(engine.stream(p, max_new_tokens=20))) for p in prompts]
    see = Sequence.see

    def slow_see(*arguments: Any) -> Any:
        time.sleep(0.002)
        return see(*arguments)

    monkeypatch.setattr(Sequence, "see", slow_see)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda p: ids(list(engine.stream(p, max_new_tokens=20))), prompts)) == alone


def test_a_second_turn_prefills_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    chat = engine.conversation()
    messages = [{"role": "user", "content": "tell me a long story about a cat"}]
    reply = engine.generate(messages, conversation=chat, max_new_tokens=20)
    read = count_what_is_read(monkeypatch)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
    list(engine.stream(messages, conversation=chat, max_new_tokens=5))
    prompt = len(tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert 0 < sum(read) < prompt // 2
    read.clear()
    list(engine.stream(messages, conversation=chat, max_new_tokens=5))
    assert not read, "regenerating rewinds; nothing is computed twice"


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_streamer_hears_what_it_would_hear_of_generate(decoding: str) -> None:
    class Heard(BaseStreamer):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.told.append(value.tolist())

        def end(self) -> None:
            self.told.append("end")

    engine, theirs, ours, stopped = tiny_engine(), Heard(), Heard(), Heard()
    transformers_greedy(engine, tokenizer()(PROMPT)["input_ids"], max_new_tokens=20, streamer=theirs)
    text = engine.generate(PROMPT, max_new_tokens=20, decoding=decoding, streamer=ours)
    assert ours.told == theirs.told
    assert len(ours.told) == 22
    stream = engine.stream(PROMPT, max_new_tokens=20, decoding=decoding, streamer=stopped)
    next(stream)
    stream.close()
    assert stopped.told[-1] == "end"
    printed = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    engine.generate(PROMPT, max_new_tokens=20, decoding=decoding, streamer=printed)
    assert "".join(printed) == text


def test_a_streamers_end_comes_even_where_a_reply_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, printed = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer()), TextIteratorStreamer(tokenizer())
    monkeypatch.setattr(engine.target, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, streamer=printed)
    assert "".join(printed) == PROMPT
