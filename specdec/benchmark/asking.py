"""Asking: questions put to lanes, interleaved so that a drifting machine hurts all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.benchmark.lanes import PROMPT_LOOKUP_TOKENS, STATIC, Answer, EngineLane, Lane, TransformersLane
from specdec.benchmark.questions import Question
from specdec.benchmark.report import Difference, Sample
from specdec.engine import SpeculativeEngine
from specdec.request import resolve
from specdec.speculators import Speculator, TopK
from specdec.speculators.memory import Memory
from specdec.speculators.replay import Trace

RUN = 5
"""Tokens in a row that tell a copy from words that happen to come again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the lanes are asked for. ``arguments`` are generate's; prompts are cut to ``prompt_limit`` tokens."""

    arguments: dict[str, Any]
    prompt_limit: int
    budget: int | str = "auto"
    memory: str = "warm"

    @property
    def sampled(self) -> bool:
        """Whether lanes draw: then transformers' lanes draw otherwise than the engine's."""
        return bool(self.arguments.get("do_sample"))


class Session:
    """The samples and traces of a run, question by question; whole questions only, however it ends."""

    def __init__(self, engine: SpeculativeEngine, names: Sequence[str], asked: Asked) -> None:
        self.engine, self.names, self.asked = engine, names, asked
        self.samples: dict[tuple[str, int], Sample] = {}
        self.traces: list[Trace] = []
        self.done = 0

    def warm_up(self, question: Question) -> None:
        """Outside the clock, with lanes (and memories) of its own."""
        self.engine.target.prepare(self.asked.prompt_limit + self.asked.arguments["max_new_tokens"])
        short = self.asked.arguments | {"max_new_tokens": 16}
        self._turns(question, self.lanes(), short, lambda name: None)

    def lanes(self, record: bool = False) -> dict[str, Lane]:
        """New lanes, each with a speculator memory of its own; ``record`` the target's view in the first that has one."""
        recorded = next((name for name in ("tree", "linear") if name in self.names), None) if record else None
        return {name: self._lane(name, name == recorded) for name in self.names}

    def ask(self, question: Question, lanes: dict[str, Lane], watch: Callable[[str], None]) -> None:
        """Every lane's answer to every turn; ``watch`` hears which lane is at work."""
        turns = self._turns(question, lanes, self.asked.arguments, watch)
        new: list[Sample] = []
        if (question.question_id, 0) not in self.samples:
            watch("comparing")
            for index, (prompt, answers) in enumerate(turns):
                lists: dict[str, list[Answer]] = {name: [] for name in self.names}
                differences = self._differences(prompt, answers)
                copied = copied_share(prompt, answers[self.names[0]].token_ids)
                new.append(Sample(question.question_id, question.category, index, lists, differences, copied))
        self.samples |= {(sample.question_id, sample.turn): sample for sample in new}
        for index, (prompt, answers) in enumerate(turns):
            for name, answer in answers.items():
                self.samples[question.question_id, index].answers[name].append(answer)
                if answer.view is not None:
                    self.traces.append(self._trace(question, prompt, answer.token_ids, answer.view))
        self.done += 1

    def _trace(self, question: Question, prompt: list[int], reply: Sequence[int], view: TopK) -> Trace:
        engine = self.engine
        request = resolve(engine.model, engine.tokenizer, engine.target.context_limit, prompt, **self.asked.arguments)
        limit, ends = request.max_new_tokens, request.eos_token_ids
        return Trace(self.done, question.category, np.array(prompt), np.array(reply), view, limit, ends)

    def _turns(
        self, question: Question, lanes: dict[str, Lane], arguments: dict[str, Any], watch: Callable[[str], None]
    ) -> list[tuple[list[int], dict[str, Answer]]]:
        """Prompt and answers of each turn; the first lane's reply is what later turns look back on."""
        for lane in lanes.values():
            lane.start()
        messages: list[dict[str, str]] = []
        turns = []
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            prompt = chat_prompt(self.engine.tokenizer, messages, self.asked.prompt_limit)
            answers = {}
            for name, lane in lanes.items():
                watch(name)
                answers[name] = lane.answer(prompt, arguments)
            reply = next(iter(answers.values())).token_ids
            messages.append({"role": "assistant", "content": self.engine.tokenizer.decode(reply, skip_special_tokens=True)})
            turns.append((prompt, answers))
        return turns

    def _differences(self, prompt: Sequence[int], answers: dict[str, Answer]) -> dict[str, Difference | None]:
        """How each answer that can be compared with plain's differs from it."""
        if "plain" not in answers:
            return {}
        return {
            name: difference(self.engine, prompt, answer, answers["plain"])
            for name, answer in answers.items()
            if not (self.asked.sampled and name.startswith("transformers"))
        }

    def _lane(self, name: str, record: bool) -> Lane:
        if name == "transformers":
            return TransformersLane(self.engine, {})
        if name == "transformers-prompt-lookup":
            return TransformersLane(self.engine, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS})
        if name == STATIC:  # one size for all prompts: another one would be compiled anew
            longest = self.asked.prompt_limit + self.asked.arguments["max_new_tokens"]
            return TransformersLane(self.engine, {"cache_implementation": "static", "max_cache_len": longest})
        return EngineLane(self.engine, name, self.asked.budget, speculators(self.engine, self.asked.memory), record)


def speculators(engine: SpeculativeEngine, memory: str) -> Callable[[], Speculator]:
    """A factory of speculators that share one memory (warm), or have each an empty one (cold)."""
    shared = Memory() if memory == "warm" else None
    return lambda: engine.speculator(shared)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], limit: int) -> list[int]:
    """The chat's tokens, cut to ``limit`` by leaving out the middle of the last message (head and tail of it stay)."""

    def encode(content: str) -> list[int]:
        cut = [*messages[:-1], {**messages[-1], "content": content}]
        return list(tokenizer.apply_chat_template(cut, add_generation_prompt=True, return_dict=False))

    token_ids = encode(messages[-1]["content"])
    content = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    while len(token_ids) > limit and len(content) > 2:
        over = min(len(token_ids) - limit, len(content) - 2)
        middle = (len(content) - over) // 2
        content = content[:middle] + content[middle + over :]
        token_ids = encode(tokenizer.decode(content))
    return token_ids


def copied_share(prompt: Sequence[int], reply: Sequence[int]) -> float:
    """The share of ``reply`` that lies in runs of at least `RUN` tokens that stand in ``prompt``, too."""
    runs = {tuple(prompt[i : i + RUN]) for i in range(len(prompt) - RUN + 1)}
    copied = np.zeros(len(reply), np.bool_)
    for i in range(len(reply) - RUN + 1):
        copied[i : i + RUN] |= tuple(reply[i : i + RUN]) in runs
    return float(copied.mean()) if reply else 0.0


def difference(engine: SpeculativeEngine, prompt: Sequence[int], mine: Answer, plain: Answer) -> Difference | None:
    """Where ``mine`` leaves ``plain``'s text, if it does."""
    pairs = enumerate(zip_longest(mine.token_ids, plain.token_ids))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return None
    top = engine.target.prefill(engine.target.new_cache(), [*prompt, *plain.token_ids[:position]], top_k=2)
    assert top is not None
    return Difference(position, float(top.logprobs[-1, 0] - top.logprobs[-1, 1]))


def time_shape(
    engine: SpeculativeEngine, names: Sequence[str], asked: Asked, prompts: int, runs: int, progress: Callable[[], object]
) -> list[Sample]:
    """Samples of lanes that do not speculate on prompts of random tokens: nothing in them but time means anything."""
    rng = np.random.default_rng(0)
    arguments = asked.arguments | {"eos_token_id": engine.target.vocab_size}  # never said: every reply is as long
    lanes = Session(engine, names, asked).lanes()
    samples = [Sample(str(i), "random", 0, {name: [] for name in names}, {}) for i in range(prompts)]
    for run in range(runs + 1):
        for sample in samples:
            prompt = rng.integers(engine.target.vocab_size, size=asked.prompt_limit).tolist()
            for name, lane in lanes.items():
                lane.start()
                answer = lane.answer(prompt, arguments)
                if run:  # the first run warms up
                    sample.answers[name].append(answer)
            progress()
    return samples
