"""Many chats at once: tokens a second, waits and gaps, lane beside lane."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, StoppingCriteriaList

from specdec.benchmark.asking import Asked, speculators
from specdec.benchmark.lanes import PassClock
from specdec.benchmark.report import markdown
from specdec.conversation import Conversation
from specdec.engine import SpeculativeEngine
from specdec.errors import first_line
from specdec.request import resolve
from specdec.sequence import Sequence as Running
from specdec.speculators import Speculator
from specdec.step import Step

TREE, PLAIN, TURNS, PADDED, CONTINUOUS = PARALLEL_LANES = (
    "tree",
    "plain",
    "turn by turn",
    "transformers",
    "transformers-continuous",
)
"""Our trees and our plain decoding in one scheduler; trees one chat after the other; generate of a batch that is padded on the
left; generate_batch."""
PEERS = (PADDED, CONTINUOUS)
"""Lanes that need not run on every device."""
WARM_UP = 8
"""New tokens of the replies that warm a lane up."""
PAGE = 256
"""Tokens of a block of generate_batch's cache: its own default."""

Prompts = Sequence[Sequence[int]]
Arrivals = Callable[[int], Sequence[float]]
"""When each of so many chats is asked for, in seconds after the start, in ascending order."""


def together(count: int) -> list[float]:
    """All chats come at once."""
    return [0.0] * count


@dataclass(slots=True)
class Reply:
    """One chat's reply. ``asked`` and ``moments`` are times of `time.perf_counter`; a moment may bring several tokens.

    ``rounds``: the scheduler's rounds from the asking to each moment. ``reading``: those that read a part of the prompt.
    ``nodes``: drafted besides the root, in all passes.
    """

    asked: float
    token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    reading: int = 0
    nodes: int = 0

    @property
    def first_token_seconds(self) -> float:
        """From the asking to the first token; the wait for others included."""
        return self.moments[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between one moment and the next: what a reader waits for more text."""
        return [after - before for before, after in pairwise(self.moments)]


@dataclass(slots=True)
class _Chat:
    """A reply that is being written. ``cached``: tokens of the prompt that are read; ``begun``: the rounds before it."""

    sequence: Running
    reply: Reply
    begun: int
    cached: int = 0

    def take(self, step: Step, rounds: int, moment: float) -> None:
        self.reply.token_ids += step.token_ids
        self.reply.moments.append(moment)
        self.reply.rounds.append(rounds - self.begun)
        self.reply.nodes += len(step.tree) - 1


class Chats:
    """Chats that the engine's scheduler writes, on a clock. ``way``: arguments of every request, as in `resolve`."""

    def __init__(self, engine: SpeculativeEngine, speculator: Callable[[], Speculator], **way: Any) -> None:
        self._engine, self._speculator = engine, speculator
        self._way = {"do_sample": False, "eos_token_id": engine.target.vocab_size, **way}  # that token is never said
        self._running: list[_Chat] = []
        self._rounds = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is being written."""
        return bool(self._running)

    def ask(self, prompt: Sequence[int], tokens: int, asked: float | None = None) -> Reply:
        """Let a reply of so many new ``tokens`` be written, ``asked`` for now or earlier."""
        engine = self._engine
        reply = Reply(time.perf_counter() if asked is None else asked)
        limit = engine.target.context_limit
        request = resolve(engine.model, engine.tokenizer, limit, prompt, max_new_tokens=tokens, **self._way)
        sequence = engine.scheduler.submit(request, Conversation(engine.target, self._speculator()))
        self._running.append(_Chat(sequence, reply, self._rounds))
        return reply

    def round(self) -> None:
        """One round of the scheduler. Raises what ended a reply."""
        self._engine.scheduler.step()
        moment = time.perf_counter()
        self._rounds += 1
        for chat in tuple(self._running):
            sequence = chat.sequence
            if sequence.passes == 0:
                chat.reply.reading += sequence.chat.cache.length > chat.cached
                chat.cached = sequence.chat.cache.length
            while sequence.steps:
                chat.take(sequence.steps.popleft(), self._rounds, moment)
            if sequence.ended:
                self._running.remove(chat)
                if sequence.error is not None:
                    raise sequence.error

    def stop(self) -> None:
        """Let go of what is still being written."""
        for chat in self._running:
            self._engine.scheduler.drop(chat.sequence)
        self._running.clear()


class Lanes:
    """The lanes of one run; each of the engine's with a speculator memory of its own, so that no lane knows another's text."""

    def __init__(self, engine: SpeculativeEngine, asked: Asked, arrivals: Arrivals = together) -> None:
        self._engine, self._asked, self._arrivals = engine, asked, arrivals
        self._speculators = {lane: speculators(engine, asked.memory) for lane in (TREE, PLAIN, TURNS)}

    def write(self, lane: str, prompts: Prompts, tokens: int) -> list[Reply]:
        """A reply of ``tokens`` new tokens to each of ``prompts``. Raises RuntimeError where a reply is shorter."""
        if lane == PADDED:
            replies = padded(self._engine, prompts, tokens)
        elif lane == CONTINUOUS:
            replies = continuous(self._engine, prompts, tokens)
        elif lane == TURNS:
            replies = self._one_by_one(prompts, tokens)
        else:
            replies = self._at_once(lane, prompts, tokens)
        if short := [reply for reply in replies if len(reply.token_ids) != tokens]:
            raise RuntimeError(f"{len(short)} of {len(replies)} replies have not {tokens} tokens")
        return replies

    def _chats(self, lane: str) -> Chats:
        decoding = PLAIN if lane == PLAIN else TREE
        return Chats(self._engine, self._speculators[lane], decoding=decoding, budget=self._asked.budget)

    def _at_once(self, lane: str, prompts: Prompts, tokens: int) -> list[Reply]:
        chats, start, replies = self._chats(lane), time.perf_counter(), []
        waiting = deque(zip(self._arrivals(len(prompts)), prompts, strict=True))
        while waiting or chats.busy:
            while waiting and start + waiting[0][0] <= time.perf_counter():
                seconds, prompt = waiting.popleft()
                replies.append(chats.ask(prompt, tokens, start + seconds))
            chats.round()
        return replies

    def _one_by_one(self, prompts: Prompts, tokens: int) -> list[Reply]:
        chats, start, replies = self._chats(TURNS), time.perf_counter(), []
        for prompt in prompts:
            replies.append(chats.ask(prompt, tokens, start))
            while chats.busy:
                chats.round()
        return replies


def padded(engine: SpeculativeEngine, prompts: Prompts, tokens: int) -> list[Reply]:
    """Transformers' generate of all prompts in one batch, padded on the left."""
    clock, longest, device = PassClock(), max(map(len, prompts)), engine.target.device
    start = time.perf_counter()
    output = engine.model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device),
        stopping_criteria=StoppingCriteriaList([clock]),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=engine.target.vocab_size,
        pad_token_id=0,
    )
    moments = [moment for _, moment in clock.ticks]
    return [Reply(start, token_ids, moments) for token_ids in output[:, longest:].tolist()]


def continuous(engine: SpeculativeEngine, prompts: Prompts, tokens: int) -> list[Reply]:
    """Transformers' continuous batching, its start-up not counted. Raises RuntimeError where it gives up a reply.

    Its cache is made as large as the prompts and replies need; by default it takes nearly all memory there is.
    """
    config = copy.deepcopy(engine.model.generation_config)
    config.update(do_sample=False, max_new_tokens=tokens, eos_token_id=engine.target.vocab_size, pad_token_id=0)
    room = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=sum(math.ceil((len(prompt) + tokens) / PAGE) for prompt in prompts),
        max_batch_tokens=sum(map(len, prompts)),
        max_requests_per_batch=len(prompts),
    )
    outputs = engine.model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=config,
        continuous_batching_config=room,
        record_timestamps=True,
    ).values()
    if error := next((output.error for output in outputs if output.error is not None), None):
        raise RuntimeError(error)
    if len(outputs) < len(prompts):
        raise RuntimeError(f"generate_batch gave {len(outputs)} of {len(prompts)} replies")
    start = min(output.created_time for output in outputs)
    return [Reply(start, output.generated_tokens, output.timestamps) for output in outputs]


class Comparison:
    """Every lane's replies to the same ``prompts``, at each number of chats at once in ``counts``."""

    def __init__(self, engine: SpeculativeEngine, prompts: Prompts, counts: Sequence[int], asked: Asked) -> None:
        self._engine, self._prompts, self._counts, self._asked = engine, prompts, counts, asked
        self._tokens: int = asked.arguments["max_new_tokens"]
        self._runs: list[dict[tuple[int, str], list[list[Reply]]]] = []
        self.absent: dict[str, str] = {}
        """Lanes that do not run here, and why."""

    @property
    def runs(self) -> int:
        """Complete runs so far."""
        return len(self._runs)

    def groups(self, count: int) -> list[Prompts]:
        """The prompts, ``count`` at a time; a rest that is fewer is left out."""
        return [self._prompts[i : i + count] for i in range(0, len(self._prompts) - count + 1, count)]

    def warm_up(self) -> None:
        """Every lane at every number of chats, outside the clock."""
        self._engine.target.prepare(max(map(len, self._prompts)) + self._tokens)
        for count in self._counts:
            lanes = Lanes(self._engine, self._asked)
            for lane in PARALLEL_LANES:
                self._write(lanes, lane, self._prompts[:count], min(WARM_UP, self._tokens))

    def run(self) -> Iterator[str]:
        """Every lane over every group, lanes interleaved and each first in its turn; yields what comes next."""
        done: dict[tuple[int, str], list[list[Reply]]] = {}
        first = len(self._runs)
        for count in self._counts:
            lanes = Lanes(self._engine, self._asked)
            for index, group in enumerate(self.groups(count), start=first):
                turn = index % len(PARALLEL_LANES)
                for lane in PARALLEL_LANES[turn:] + PARALLEL_LANES[:turn]:
                    yield f"{count} at once, {lane}"
                    if (replies := self._write(lanes, lane, group, self._tokens)) is not None:
                        done.setdefault((count, lane), []).append(replies)
        self._runs.append(done)

    def _write(self, lanes: Lanes, lane: str, prompts: Prompts, tokens: int) -> list[Reply] | None:
        """A lane's replies; None where it is one of transformers' and does not run here."""
        if lane in self.absent:
            return None
        try:
            return lanes.write(lane, prompts, tokens)
        except Exception as error:  # whatever keeps another engine from running here is to be told, not to end the run
            if lane not in PEERS:
                raise
            self.absent[lane] = f"{type(error).__name__}: {first_line(error)}"
            return None

    def figures(self) -> dict[str, Any]:
        """``{"lanes": {count: {lane: figures}}, "absent": {lane: reason}}``, of the complete runs."""
        lanes = [lane for lane in PARALLEL_LANES if lane not in self.absent]
        return {
            "lanes": {str(count): {lane: self._figures(count, lane) for lane in lanes} for count in self._counts},
            "absent": self.absent,
        }

    def _figures(self, count: int, lane: str) -> dict[str, Any]:
        replies = [reply for run in self._runs for group in run[count, lane] for reply in group]
        tokens, passes = sum(len(reply.token_ids) for reply in replies), sum(len(reply.moments) for reply in replies)
        rates = [_rate(run[count, lane]) for run in self._runs]
        best = [_rate(run[count, TREE]) for run in self._runs]
        texts, plain = ([reply.token_ids for group in self._runs[0][count, name] for reply in group] for name in (lane, PLAIN))
        return {
            "replies": len(replies),
            "tokens": tokens,
            "tokens_per_second": summary(rates),
            "tree_over_lane": summary([a / b for a, b in zip(best, rates, strict=True)]),
            "first_token_seconds": percentiles([reply.first_token_seconds for reply in replies]),
            "gap_seconds": percentiles([gap for reply in replies for gap in reply.gaps]),
            "nodes_per_pass": sum(reply.nodes for reply in replies) / passes,
            "tokens_per_pass": tokens / passes,
            "asked": len(texts),
            "identical": sum(a == b for a, b in zip(texts, plain, strict=True)),
        }


def _rate(groups: Sequence[Sequence[Reply]]) -> float:
    """Tokens of all replies by the seconds from the first asking to the last token, group after group."""
    seconds = [max(r.moments[-1] for r in group) - min(r.asked for r in group) for group in groups]
    return sum(len(reply.token_ids) for group in groups for reply in group) / sum(seconds)


def summary(values: Sequence[float]) -> dict[str, float]:
    """The median of some runs, the least and the greatest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The median and the 95th percentile; None of nothing."""
    median, p95 = np.percentile(values, [50, 95]).tolist() if values else (None, None)
    return {"median": median, "p95": p95}


def parallel_table(figures: dict[str, Any]) -> str:
    """`Comparison.figures` as a Markdown table, and a line for every lane that does not run here."""
    header = [
        "at once",
        "lane",
        "tokens",
        "tok/s",
        "tree is x times",
        "first token s",
        "gap ms",
        "nodes",
        "tok/pass",
        "identical",
    ]
    rows = [
        [
            count,
            lane,
            f"{f['tokens']}",
            spread(f["tokens_per_second"], 1),
            spread(f["tree_over_lane"], 2),
            both(f["first_token_seconds"], 1, 3),
            both(f["gap_seconds"], 1e3, 1),
            f"{f['nodes_per_pass']:.1f}",
            f"{f['tokens_per_pass']:.2f}",
            f"{f['identical']}/{f['asked']}",
        ]
        for count, lanes in figures["lanes"].items()
        for lane, f in lanes.items()
    ]
    notes = [
        "tok/s: of all chats together, prompts included; median of the runs [lowest, highest]. first token, gap: median / 95th "
        "percentile; a gap is the wait for more text of a reply, which may be several tokens. nodes: drafted per reply and "
        "pass. identical: replies that equal plain's.",
        *(f"{lane} does not run here: {reason}" for lane, reason in figures["absent"].items()),
    ]
    return "\n".join([markdown([header, *rows]), "", *notes])


def spread(values: dict[str, float], digits: int) -> str:
    """A `summary` in words: the median [lowest, highest]."""
    return f"{values['median']:.{digits}f} [{values['low']:.{digits}f}, {values['high']:.{digits}f}]"


def both(values: dict[str, float | None], scale: float, digits: int) -> str:
    """`percentiles` in words, times ``scale``; a dash where there was nothing."""
    return " / ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values.values())
