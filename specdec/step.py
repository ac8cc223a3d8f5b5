"""Step: what one target pass did. The sole currency of page, benchmark, tests and telemetry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdec.accept import Verdict
from specdec.tree import Source, TokenTree

FinishReason = Literal["eos", "stop_string", "stopping_criteria", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of the parts of a pass, the same for all texts in it; ``prefill``: of a reply, in its first step.

    What only a watcher asks for (`Step.target`) is computed after the step and is part of none, but where all choices are drawn
    at once on the device: there it comes with them, in ``verify``.
    """

    prefill: float
    draft: float
    verify: float
    accept: float
    commit: float

    @property
    def decode(self) -> float:
        """Everything but the prefill."""
        return self.draft + self.verify + self.accept + self.commit


@dataclass(frozen=True, slots=True)
class TargetView:
    """What the target thought of each node, [N]; computed only when asked for (``stream(details=True)``).

    ``probs[i]`` is the target's probability (softmax of its raw logits) of node i's token after node i's parent,
    ``ranks[i]`` the number of tokens it finds more probable there (0: its first choice). The root has 1 and 0.
    ``next_prob`` and ``next_rank`` are those of the verdict's ``next_token``; None in older traces.
    """

    probs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    next_prob: float | None = None
    next_rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As in `Step.to_json`."""
        return {
            "probs": [round(float(p), 4) for p in self.probs],
            "ranks": self.ranks.tolist(),
            "next_prob": None if self.next_prob is None else round(self.next_prob, 4),
            "next_rank": self.next_rank,
        }


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the target thought of each of E emitted tokens; computed only when asked for (``stream(logprobs=K)``).

    ``own`` [E]: log-probability of the token (log-softmax of the target's raw logits, before temperature and every other
    processor). ``token_ids`` [E, K] and ``best`` [E, K]: the most probable tokens in its place, best first, with theirs.
    """

    own: NDArray[np.float32]
    token_ids: NDArray[np.int32]
    best: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass of a reply.

    ``token_ids`` are the emitted tokens (accepted path, then the verdict's ``next_token``; cut at a stop), ``text`` the
    characters that became complete with them (may be empty: half an emoji waits for its other half). ``context_length``
    counts the tokens before the root, i.e. those whose K/V was cached when the pass began. ``sequences`` texts were verified in
    this pass. ``plain_seconds`` is what the pass would cost on this device at this moment without any draft (measured, see
    `specdec.cost.PassCost`): of a text alone, a plain single-token pass.
    ``finish_reason`` is None until the last step. ``note``: why nothing was drafted although speculation is on.
    """

    index: int
    tree: TokenTree
    verdict: Verdict
    token_ids: tuple[int, ...]
    text: str
    timings: Timings
    context_length: int
    plain_seconds: float
    finish_reason: FinishReason | None = None
    target: TargetView | None = None
    logprobs: Logprobs | None = None
    note: str | None = None
    sequences: int = 1

    @property
    def expected_tokens(self) -> float:
        """How many tokens the speculator expected the pass to give; the actual number is ``len(token_ids)``.

        The two count the same tokens: the speculator knows which ids end the reply and how many tokens it may have, and drafts
        nothing beyond. It does not know about stop strings and stopping criteria: where one of them cuts the accepted path,
        tokens behind the cut are not expected either.
        """
        cut = len(self.token_ids) < len(self.verdict.path)
        return self.tree.expected_tokens(len(self.token_ids) if cut else None)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; field names as in the dataclasses. ``logprobs`` are left out."""
        tree, target = self.tree, self.target
        return {
            "index": self.index,
            "tree": {
                "token_ids": tree.token_ids.tolist(),
                "parents": tree.parents.tolist(),
                "scores": None if tree.scores is None else [round(float(s), 4) for s in tree.scores],
                "sources": None if tree.sources is None else [Source(s).name.lower() for s in tree.sources.tolist()],
            },
            "verdict": {
                "path": list(self.verdict.path),
                "next_token": self.verdict.next_token,
                "kind": self.verdict.kind,
            },
            "token_ids": list(self.token_ids),
            "text": self.text,
            "timings": {name: round(seconds, 6) for name, seconds in asdict(self.timings).items()},
            "context_length": self.context_length,
            "plain_seconds": round(self.plain_seconds, 6),
            "finish_reason": self.finish_reason,
            "target": None if target is None else target.to_json(),
            "note": self.note,
            "sequences": self.sequences,
        }
