"""Lanes: the ways of decoding that are compared, each giving an Answer with its passes on a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from specdec.conversation import Conversation
from specdec.engine import SpeculativeEngine
from specdec.speculators import Speculator, TopK
from specdec.speculators.replay import Recorder
from specdec.stats import Stats
from specdec.step import Step
from specdec.transfer import synchronize

LANES = ("plain", "linear", "tree", "transformers", "transformers-prompt-lookup", "transformers-static")
STATIC = LANES[-1]
"""generate with a static cache, which transformers compiles on CUDA; elsewhere it has no advantage, and is no default lane."""
PROMPT_LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens`` of the peer lane: the value of transformers' own documentation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One lane's reply to one prompt: its tokens, and for every target pass after prefill (tokens, seconds).

    ``view``, where it was asked for: what the target said after every position of prompt and reply but the last.
    """

    token_ids: tuple[int, ...]
    passes: tuple[tuple[int, float], ...]
    prefill_seconds: float
    steps: tuple[Step, ...] = ()
    view: TopK | None = None

    def rate(self, tokens: int) -> float:
        """Decode tokens per second over the first ``tokens`` tokens (whole passes)."""
        emitted, seconds = 0, 0.0
        for count, duration in self.passes:
            if emitted >= tokens:
                break
            emitted, seconds = emitted + count, seconds + duration
        return emitted / seconds if seconds else 0.0


class Lane(Protocol):
    """One way of decoding. `start` begins a question; `answer` replies to one of its prompts."""

    def start(self) -> None:
        """Forget the conversation before."""

    def answer(self, prompt: Sequence[int], arguments: dict[str, Any]) -> Answer:
        """Reply to ``prompt``; ``arguments`` as in generate."""
        ...


@dataclass
class EngineLane:
    """plain, linear or tree decoding by this engine, every turn of a question in one conversation.

    ``record``: its answers hold the target's view. Plain decoding asks for none.
    """

    engine: SpeculativeEngine
    decoding: str
    budget: int | str
    speculator: Callable[[], Speculator]
    record: bool = False
    conversation: Conversation = field(init=False)

    def start(self) -> None:
        """A fresh conversation; what the speculator remembers across conversations is the factory's business."""
        speculator = Recorder(self.speculator()) if self.record else self.speculator()
        self.conversation = Conversation(self.engine.target, speculator)

    def answer(self, prompt: Sequence[int], arguments: dict[str, Any]) -> Answer:
        """Stream the reply, timing each step from outside: everything the engine does counts."""
        stream = self.engine.stream(
            prompt, conversation=self.conversation, decoding=self.decoding, budget=self.budget, **arguments
        )
        steps: list[Step] = []
        passes: list[tuple[int, float]] = []
        while True:
            start = time.perf_counter()
            step = next(stream, None)
            seconds = time.perf_counter() - start
            if step is None:
                break
            steps.append(step)
            passes.append((len(step.token_ids), seconds - step.timings.prefill))
        tokens = tuple(token for step in steps for token in step.token_ids)
        speculator = self.conversation.speculator
        view = speculator.view if isinstance(speculator, Recorder) else None
        return Answer(tokens, tuple(passes), steps[0].timings.prefill, tuple(steps), view)


class PassClock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes the time and the length after every pass of transformers' generate."""

    def __init__(self) -> None:
        self.ticks: list[tuple[int, float]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note the time and the length of ``input_ids`` [B, T]; no row is to stop."""
        synchronize(input_ids.device)  # generate waits for the token right after this anyway
        self.ticks.append((input_ids.shape[1], time.perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class TransformersLane:
    """The library's own generate; its prefill gives the first token, so the passes after it are what is compared."""

    engine: SpeculativeEngine
    extra: dict[str, Any]

    def start(self) -> None:
        """Nothing to forget: generate keeps no state."""

    def answer(self, prompt: Sequence[int], arguments: dict[str, Any]) -> Answer:
        """Generate, with a clock among the stopping criteria."""
        clock = PassClock()
        arguments = dict(arguments)
        torch.manual_seed(arguments.pop("seed", 0))
        start = time.perf_counter()
        output = self.engine.model.generate(
            torch.tensor([prompt], device=self.engine.target.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=self.engine.target.device),
            stopping_criteria=StoppingCriteriaList([clock]),
            **arguments,
            **self.extra,
        )
        passes = [
            (length - length_before, moment - moment_before)
            for (length_before, moment_before), (length, moment) in zip(clock.ticks, clock.ticks[1:], strict=False)
        ]
        return Answer(tuple(output[0, len(prompt) :].tolist()), tuple(passes), clock.ticks[0][1] - start)


def stats(answers: Sequence[Answer]) -> Stats:
    """All steps of several answers, folded."""
    folded = Stats()
    for answer in answers:
        for step in answer.steps:
            folded.add(step)
    return folded
