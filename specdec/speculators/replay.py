"""Score a speculator without a model, on recorded replies.

Tokens per pass depend only on what the speculator proposes and on what the target says, never on the machine's load; and a
target says the same thing however it is asked. So a reply recorded once, with the target's most probable next tokens after
every position, can be replayed against any speculator in milliseconds. A replay knows the target's view of accepted nodes
only, not of rejected ones: it is a lower bound for speculators that learn from those.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.speculators import DraftRequest, Proposal, Speculator, TopK
from specdec.speculators.storage import Arrays, load_arrays, save_arrays
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded reply: ``top`` is the target's view of every position of prompt + reply but the last.

    ``conversation`` numbers the chat it belongs to: traces of one number are its turns, in order. ``limit`` and ``ends``: the
    most tokens that the reply could have, and the token ids that could end it sooner.
    """

    conversation: int
    category: str
    prompt_ids: NDArray[np.int64]
    reply_ids: NDArray[np.int64]
    top: TopK
    limit: int
    ends: frozenset[int]

    def __post_init__(self) -> None:
        if not len(self.prompt_ids) or len(self.top) != len(self.prompt_ids) + len(self.reply_ids) - 1:
            raise ValueError("a trace needs a prompt, and the target's view of every position but the last")


@dataclass(frozen=True, slots=True)
class Recording:
    """Replies of one ``model``; ``vocabulary`` is the name of the file that holds what was studied of it."""

    model: str
    vocab_size: int
    vocabulary: str
    traces: tuple[Trace, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one file; log-probabilities as float16."""
        arrays: Arrays = {
            "model": np.array([self.model, self.vocabulary], np.str_),
            "vocab_size": np.array(self.vocab_size),
            "conversations": np.array([trace.conversation for trace in self.traces], np.int64),
            "categories": np.array([trace.category for trace in self.traces], np.str_),
            "limits": np.array([trace.limit for trace in self.traces], np.int64),
        }
        for i, trace in enumerate(self.traces):
            arrays[f"{i}.prompt_ids"] = trace.prompt_ids.astype(np.int32)
            arrays[f"{i}.reply_ids"] = trace.reply_ids.astype(np.int32)
            arrays[f"{i}.ends"] = np.array(sorted(trace.ends), np.int64)
            arrays[f"{i}.token_ids"] = trace.top.token_ids
            arrays[f"{i}.logprobs"] = trace.top.logprobs.astype(np.float16)
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """What `save` wrote; ValueError where the file holds something else."""
        arrays = load_arrays(path)
        try:
            model, vocabulary = map(str, arrays["model"])
            traces = tuple(
                Trace(
                    int(conversation),
                    str(category),
                    arrays[f"{i}.prompt_ids"].astype(np.int64),
                    arrays[f"{i}.reply_ids"].astype(np.int64),
                    TopK(arrays[f"{i}.token_ids"], arrays[f"{i}.logprobs"].astype(np.float32)),
                    int(limit),
                    frozenset(arrays[f"{i}.ends"].tolist()),
                )
                for i, (conversation, category, limit) in enumerate(
                    zip(arrays["conversations"], arrays["categories"], arrays["limits"], strict=True)
                )
            )
            return cls(model, int(arrays["vocab_size"]), vocabulary, traces)
        except KeyError as error:
            raise ValueError(f"{path} holds no recorded replies ({error} is missing); record with --record") from error


class Recorder:
    """A speculator that hands everything on to another one, and keeps what the target said on the way."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator, self.top_k = speculator, speculator.top_k
        self._views: list[TopK] = []

    def begin(self, token_ids: Sequence[int], top: TopK | None, start: int) -> None:
        """What was kept of the positions before ``start`` stays true."""
        self._views = [_rows(self.view, 0, start, self.top_k)] if self._views else []
        if top is not None:
            self._views.append(top)
        self.speculator.begin(token_ids, top, start)

    def expect(self, token_ids: Sequence[int]) -> None:
        """As the other one."""
        self.speculator.expect(token_ids)

    def propose(self, request: DraftRequest) -> Proposal:
        """The other one's proposal."""
        return self.speculator.propose(request)

    def observe(self, tree: TokenTree, path: Sequence[int], emitted: Sequence[int], top: TopK | None) -> None:
        """Keep the accepted nodes' rows."""
        if top is not None:
            self._views.append(TopK(top.token_ids[list(path)], top.logprobs[list(path)]))
        self.speculator.observe(tree, path, emitted, top)

    @property
    def view(self) -> TopK:
        """The target's view of every position of prompt and reply so far but the last."""
        return TopK.concatenate(self._views)


@dataclass(frozen=True, slots=True)
class Score:
    """What a replay counts: emitted ``tokens``, target ``passes``, ``drafted`` and ``accepted`` nodes.

    ``expected`` is the speculator's forecast of ``tokens`` (`TokenTree.expected_tokens`).
    ``draft_seconds`` were spent on proposals, ``learn_seconds`` on verdicts; they are the machine's, and not compared.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    expected: float = 0.0
    draft_seconds: float = field(default=0.0, compare=False)
    learn_seconds: float = field(default=0.0, compare=False)

    def __add__(self, other: Score) -> Score:
        return Score(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_pass(self) -> float:
        """Mean acceptance length."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def expected_tokens_per_pass(self) -> float:
        """The speculator's forecast of `tokens_per_pass`."""
        return self.expected / self.passes if self.passes else 0.0


def replay(trace: Trace, speculator: Speculator, budget: int) -> Score:
    """Decode ``trace`` again with ``speculator`` at ``budget`` nodes a pass; a second turn goes to the same speculator."""
    prompt, reply = trace.prompt_ids, trace.reply_ids.tolist()
    first = len(prompt) - 1  # the row of `top` that emits the reply's first token
    speculator.begin(prompt.tolist(), _rows(trace.top, 0, first, speculator.top_k) if speculator.top_k else None, 0)
    score, position = Score(), 0
    while position < len(reply):
        start = time.perf_counter()
        tree = speculator.propose(DraftRequest(budget, depth=trace.limit - position - 1, ends=trace.ends)).tree
        drafted = time.perf_counter() - start
        path = _walk(tree, reply[position:])
        emitted = reply[position : position + len(path)]
        path = path[: len(emitted)]
        row = first + position
        accepted = TokenTree.chain(tree.token_ids[path].tolist())
        view = _rows(trace.top, row, row + len(path), speculator.top_k)
        start = time.perf_counter()
        speculator.observe(accepted, range(len(path)), emitted, view if speculator.top_k else None)
        learned = time.perf_counter() - start
        score += Score(len(emitted), 1, len(tree) - 1, len(path) - 1, tree.expected_tokens(), drafted, learned)
        position += len(emitted)
    return score


def _rows(top: TopK, start: int, stop: int, k: int) -> TopK:
    return TopK(top.token_ids[start:stop, :k], top.logprobs[start:stop, :k])


def _walk(tree: TokenTree, reply: Sequence[int]) -> list[int]:
    """The nodes, root first, that carry the tokens of ``reply`` one after the other."""
    children, path = tree.children(), [0]
    for token in reply:
        if token not in children[path[-1]]:
            break
        path.append(children[path[-1]][token])
    return path
