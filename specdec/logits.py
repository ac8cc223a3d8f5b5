"""What a pass's logits say: the best token, the most probable ones, and the target's view of a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.accept import Verdict
from specdec.sampling import NO_TOKEN
from specdec.speculators import TopK
from specdec.speculators._compiled import compiled
from specdec.step import Logprobs, TargetView
from specdec.transfer import to_device
from specdec.tree import TokenTree

BLOCK = 64
"""Vocabulary entries that are looked at together: most blocks hold nothing of interest."""
TAIL = 4096
"""Tokens from which the weight of all improbable ones is estimated; a vocabulary of less than twice that is summed whole."""

View = Callable[[Verdict], TargetView]
"""The target's view of a tree, once its verdict is known."""


def argmax(logits: Tensor) -> list[int]:
    """The best token of each row of ``logits`` [N, V] float32, the first of equals; NO_TOKEN for a row with a NaN."""
    if logits.device.type != "cpu":
        return _chosen(*(part.cpu().numpy() for part in logits.max(-1)))
    rows = logits.numpy()
    tokens = rows.argmax(-1)  # several times faster than torch's
    return _chosen(rows[np.arange(len(rows)), tokens], tokens)


def _chosen(scores: NDArray[np.float32], tokens: NDArray[Any]) -> list[int]:
    """``tokens`` that are the best by ``scores``; NO_TOKEN where that is not a number."""
    chosen: list[int] = np.where(np.isnan(scores), NO_TOKEN, tokens).tolist()
    return chosen


@torch.inference_mode()
@np.errstate(invalid="ignore")  # that logits are no numbers is told by whoever chooses by them
def top_tokens(logits: Tensor, k: int) -> TopK:
    """The ``k`` most probable next tokens of each row of ``logits`` [N, V] float32, with log-probabilities, best first.

    On a CPU the tail of the normaliser (what the tokens beyond the best k weigh) is estimated from some `TAIL` of them.
    """
    k = min(k, logits.shape[1])
    if logits.device.type != "cpu":
        return fetch(logits, None, k)[1]
    if short := -logits.shape[1] % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, short), value=-torch.inf)
    blocks = logits.reshape(len(logits), -1, BLOCK).amax(-1)
    token_ids, best = np.zeros((len(logits), k), np.int32), np.full((len(logits), k), -np.inf, np.float32)
    _select(logits.numpy(), blocks.numpy(), token_ids, best)
    stride = max(logits.shape[1] // TAIL, 1)  # of blocks: a part of every one would read them all
    tail = logits.reshape(len(logits), -1, BLOCK)[:, ::stride].flatten(1).numpy()
    tail_weight = np.where(tail < best[:, -1:], np.exp(tail - best[:, :1]), 0).sum(-1, keepdims=True) * stride
    weight = np.exp(best - best[:, :1]).sum(-1, keepdims=True) + tail_weight
    return TopK(token_ids, best - best[:, :1] - np.log(weight))


class Fetched(NamedTuple):
    """What the host got of a text's pass: the target's choice after each node, its best next tokens, its view of the tree."""

    choices: list[int]
    top: TopK
    view: View | None


class Fetch:
    """What the host wants to know of ``logits`` [N, V] float32, computed where they lie: choices, ``k`` best next tokens, view.

    ``best``: scores and tokens [N] of the choices, as `Sampler.draw` gives them. The verdict comes after the transfer, so the
    view of ``tree``, where given, brings along what the target thought of each of the choices. `bring` takes all of it, of all
    texts of a pass, to the host in one transfer.
    """

    @torch.inference_mode()
    def __init__(self, logits: Tensor, best: tuple[Tensor, Tensor] | None, k: int, tree: TokenTree | None = None) -> None:
        k = min(k, logits.shape[1])
        values, places = logits.topk(k, dim=-1)
        logprobs = values - logits.logsumexp(-1, keepdim=True) if k else values
        nothing = logits.new_empty(len(logits), 0)
        scores, tokens = (nothing, nothing) if best is None else (part[:, None] for part in best)
        seen = nothing
        self._viewed = tree is not None and best is not None
        if tree is not None and best is not None:
            before = to_device(tree.parents, logits.device)  # -1 of the root is some row
            seen = torch.cat([_seen(logits[before], to_device(tree.token_ids, logits.device)), _seen(logits, best[1])], dim=1)
        numbers, integers = [scores, logprobs, seen], [tokens, places]
        parts = [*(part.view(torch.int32) for part in numbers), *(part.to(torch.int32) for part in integers)]
        self._ends = np.cumsum([part.shape[1] for part in parts[:-1]])
        self._packed = torch.cat(parts, dim=1)

    def unpack(self, host: NDArray[np.int32]) -> Fetched:
        """What it asked for, from what lies on the ``host``."""
        columns = np.split(host, self._ends, axis=1)
        own, logprob, views = (np.ascontiguousarray(column).view(np.float32) for column in columns[:3])
        nodes, nexts = np.split(views, 2, axis=1)
        view = (lambda verdict: _view(nodes, nexts[verdict.path[-1]])) if self._viewed else None
        return Fetched(_chosen(own.ravel(), columns[3].ravel()), TopK(columns[4], logprob), view)

    @staticmethod
    @torch.inference_mode()
    def bring(fetches: Sequence[Fetch]) -> list[NDArray[np.int32]]:
        """What each of ``fetches`` computed, in one transfer: the only one that waits for the device."""
        if not fetches:
            return []
        flat = torch.cat([fetch._packed.flatten() for fetch in fetches]).cpu().numpy()
        ends = np.cumsum([fetch._packed.numel() for fetch in fetches])[:-1]
        return [part.reshape(fetch._packed.shape) for part, fetch in zip(np.split(flat, ends), fetches, strict=True)]


def fetch(logits: Tensor, best: tuple[Tensor, Tensor] | None, k: int, tree: TokenTree | None = None) -> Fetched:
    """One `Fetch`, brought and unpacked."""
    one = Fetch(logits, best, k, tree)
    return one.unpack(Fetch.bring([one])[0])


@compiled
def _select(
    logits: NDArray[np.float32],
    blocks: NDArray[np.float32],
    token_ids: NDArray[np.int32],
    best: NDArray[np.float32],
) -> None:
    """The largest entries of each row of ``logits`` [N, V], whose blocks have the maxima ``blocks`` [N, V / BLOCK].

    They go into ``token_ids`` and ``best`` [N, K], best first; of equals the first. Most blocks need no look inside.
    """
    last = token_ids.shape[1] - 1
    for row in range(logits.shape[0]):
        for block in range(blocks.shape[1]):
            if blocks[row, block] <= best[row, last]:
                continue
            for token in range(block * BLOCK, (block + 1) * BLOCK):
                value = logits[row, token]
                if value <= best[row, last]:
                    continue
                place = last
                while place > 0 and value > best[row, place - 1]:
                    best[row, place] = best[row, place - 1]
                    token_ids[row, place] = token_ids[row, place - 1]
                    place -= 1
                best[row, place] = value
                token_ids[row, place] = token


@torch.inference_mode()
def target_view(logits: Tensor, tree: TokenTree, verdict: Verdict) -> TargetView:
    """What the target thought of ``tree`` and of its own token after the path, from its pass's ``logits`` [N, V] float32."""
    before, tokens = np.append(tree.parents, verdict.path[-1]), np.append(tree.token_ids, verdict.next_token)
    if logits.device.type != "cpu":
        rows = logits[to_device(before, logits.device)]
        seen = _seen(rows, to_device(tokens, logits.device)).cpu().numpy()
    else:
        inner, places = np.unique(before[1:], return_inverse=True)
        rows = logits[torch.from_numpy(inner)]
        normalisers, scores = rows.logsumexp(-1).numpy()[places], rows.numpy()
        own = scores[places, tokens[1:]]
        seen = np.zeros((len(tokens), 2), np.float32)
        seen[1:, 0] = np.exp(own - normalisers)
        seen[1:, 1] = [np.count_nonzero(scores[place] > score) for place, score in zip(places, own, strict=True)]
    return _view(seen[:-1], seen[-1])


@torch.inference_mode()
def logprobs(logits: Tensor, path: Sequence[int], token_ids: Sequence[int], k: int) -> Logprobs:
    """Of ``token_ids``, each emitted after the node of ``path`` in its place, by ``logits`` [N, V] float32: in one transfer."""
    places, tokens = (to_device(np.array(part, np.int64), logits.device) for part in (path[: len(token_ids)], token_ids))
    rows = logits[places].log_softmax(-1)
    values, others = rows.topk(min(k, rows.shape[1]))
    scores = torch.cat([rows.gather(1, tokens[:, None]), values], dim=1).view(torch.int32)
    host = torch.cat([scores, others.to(torch.int32)], dim=1).cpu().numpy()
    numbers, ids = np.split(host, [scores.shape[1]], axis=1)
    numbers = np.ascontiguousarray(numbers).view(np.float32)
    return Logprobs(numbers[:, 0], ids, numbers[:, 1:])


def _seen(rows: Tensor, token_ids: Tensor) -> Tensor:
    """Probability and rank of a token in each of ``rows`` [N, V] of logits, [N, 2] float32; nothing waits for the device."""
    own = rows.gather(1, token_ids[:, None])
    return torch.cat([(own - rows.logsumexp(-1, keepdim=True)).exp(), (rows > own).sum(-1, keepdim=True).float()], dim=1)


def _view(nodes: NDArray[np.float32], own: NDArray[np.float32]) -> TargetView:
    """From what `_seen` says of the nodes, the root's without meaning, and of the target's own token."""
    probs, ranks = np.nan_to_num(nodes[:, 0]), nodes[:, 1].astype(np.int64)  # NaN after a rejected node that overflowed
    probs[0], ranks[0] = 1, 0
    return TargetView(probs, ranks, float(np.nan_to_num(own[0])), int(own[1]))
