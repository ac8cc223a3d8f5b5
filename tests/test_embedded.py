"""Laws 1 and 2 on the real embedded model, in float32, over varied prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.benchmark.questions import load_questions
from specdec.conversation import Conversation
from specdec.engine import SpeculativeEngine
from specdec.folders import SHIPPED, model_file
from specdec.speculators.memory import Memory
from specdec.speculators.vocabulary import Vocabulary
from specdec.stats import Stats
from specdec.study import ROUNDS

PROMPTS = [question.turns[0] for question in load_questions(limit=12)]
TOKENS = 16


@pytest.fixture(scope="module")
def engine() -> SpeculativeEngine:
    return SpeculativeEngine(dtype="float32")


@pytest.fixture(scope="module", params=PROMPTS, ids=range(len(PROMPTS)))
def chat(engine: SpeculativeEngine, request: pytest.FixtureRequest) -> tuple[list[dict[str, str]], Conversation]:
    """A prompt, and the conversation in which it is answered again and again: it is read once."""
    return [{"role": "user", "content": request.param[-600:]}], engine.conversation()


def ids(engine: SpeculativeEngine, chat: tuple[list[dict[str, str]], Conversation], **arguments: Any) -> list[int]:
    messages, conversation = chat
    steps = engine.stream(messages, conversation=conversation, max_new_tokens=TOKENS, **arguments)
    return [token for step in steps for token in step.token_ids]


def test_the_study_of_the_default_model_comes_with_the_package(engine: SpeculativeEngine) -> None:
    study = Vocabulary.load(SHIPPED / model_file("vocabulary", engine.model).name)
    assert study.adjacent == engine.target.vocab_size
    assert study.rounds >= ROUNDS


def test_greedy_tree_linear_plain_and_transformers_agree(
    engine: SpeculativeEngine, chat: tuple[list[dict[str, str]], Conversation]
) -> None:
    tokens = engine.tokenizer.apply_chat_template(chat[0], add_generation_prompt=True, return_dict=False)
    output = engine.model.generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, max_new_tokens=TOKENS
    )
    reference = output[0, len(tokens) :].tolist()
    for decoding in ("plain", "linear", "tree"):
        assert ids(engine, chat, decoding=decoding, budget=16 if decoding != "plain" else 0) == reference


def test_sampled_tree_linear_and_plain_agree(
    engine: SpeculativeEngine, chat: tuple[list[dict[str, str]], Conversation], request: pytest.FixtureRequest
) -> None:
    """At three temperatures in turn, prompt by prompt."""
    temperature = (0.5, 0.8, 1.2)[request.node.callspec.indices["chat"] % 3]
    arguments: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "seed": 5}
    plain = ids(engine, chat, decoding="plain", **arguments)
    for decoding in ("linear", "tree"):
        assert ids(engine, chat, decoding=decoding, budget=16, **arguments) == plain


def folded(engine: SpeculativeEngine, question: str, **arguments: Any) -> Stats:
    """The figures of the reply to ``question`` in a new conversation."""
    stats = Stats()
    for step in engine.stream([{"role": "user", "content": question}], do_sample=False, **arguments):
        stats.add(step)
    return stats


COPIED = next(question.turns[0] for question in load_questions() if "celsius" in question.turns[0])


def test_a_copy_heavy_prompt_takes_a_third_of_plain_decodings_passes(engine: SpeculativeEngine) -> None:
    assert folded(engine, COPIED, max_new_tokens=64, budget=16).tokens_per_pass >= 3


def test_a_question_asked_again_in_another_chat_takes_less_than_half_the_passes_with_memory(
    engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "memory", Memory())
    first, again = (folded(engine, "What should I see in Paris?", max_new_tokens=48, budget=16) for _ in range(2))
    assert again.tokens == first.tokens
    assert again.passes < first.passes / 2


@pytest.mark.measured
def test_a_copy_heavy_prompt_gains_at_least_half_again_in_wall_clock() -> None:
    """As the app has it: in the dtype that this device is fast in, with the budget that pays for itself."""
    engine = SpeculativeEngine()
    for _ in range(2):  # the first run warms up
        plain, tree = (folded(engine, COPIED, max_new_tokens=100, decoding=decoding) for decoding in ("plain", "tree"))
    assert tree.tokens_per_second >= 1.5 * plain.tokens_per_second
