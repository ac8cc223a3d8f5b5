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
    return [{"role": "user", "content": request.param[-1200:]}], engine.conversation()


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


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.2])
def test_sampled_tree_linear_and_plain_agree(
    engine: SpeculativeEngine, chat: tuple[list[dict[str, str]], Conversation], temperature: float
) -> None:
    arguments: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "seed": 5}
    plain = ids(engine, chat, decoding="plain", **arguments)
    for decoding in ("linear", "tree"):
        assert ids(engine, chat, decoding=decoding, budget=16, **arguments) == plain


@pytest.fixture(scope="module")
def default_engine() -> SpeculativeEngine:
    """As the app has it: in the dtype that this device is fast in."""
    return SpeculativeEngine()


@pytest.mark.alone
def test_a_copy_heavy_prompt_gains_at_least_half_again_in_wall_clock(
    default_engine: SpeculativeEngine, every_core: None
) -> None:
    """In the default dtype, one run: at least 3 tokens per pass, and 1.5 times as fast as plain decoding."""
    messages = [{"role": "user", "content": next(q.turns[0] for q in load_questions() if "celsius" in q.turns[0])}]
    stats = {"plain": Stats(), "tree": Stats()}
    for _ in range(2):
        for decoding, folded in stats.items():
            for step in default_engine.stream(messages, decoding=decoding, do_sample=False, max_new_tokens=100):
                folded.add(step)
    assert stats["tree"].tokens_per_pass >= 3
    assert stats["tree"].tokens_per_second >= 1.5 * stats["plain"].tokens_per_second


TOPICS = [
    ("Explain how a bicycle gear works.", "Why does a bicycle have gears?"),
    ("Write a short poem about the sea.", "Write another poem about the sea."),
    ("What should I see in Paris in two days?", "Plan a weekend in Paris for me."),
]


def test_a_second_chat_on_the_same_topic_takes_fewer_passes_with_memory(default_engine: SpeculativeEngine) -> None:
    def passes(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        return sum(1 for _ in default_engine.stream(messages, do_sample=False, max_new_tokens=96, budget=16))

    without = sum(passes(second) for _, second in TOPICS)
    default_engine.memory = Memory()
    for first, _ in TOPICS:
        passes(first)
    remembering = sum(passes(second) for _, second in TOPICS)
    default_engine.memory = None
    assert remembering < without
