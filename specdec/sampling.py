"""From logits to the target's next token: transformers' own processors, then an argmax.

Sampling is an argmax too. With independent Gumbel noise g, ``argmax(scores + g)`` is an exact draw from
``softmax(scores)`` (Gumbel-max trick). Here the noise is a function of (seed, position, token id) alone, so the draw at a
position does not depend on how the text before it was decoded: plain, linear and tree decoding give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.transfer import to_device

_BLIND = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that look at the scores alone, each row by itself, and never at the text."""

NO_TOKEN = -1
"""The choice where the best score is not a number."""

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for drawing the token at ``position``, one value per entry of ``token_ids`` (int64), float64.

    A counter-based generator: the 32-bit finaliser "lowbias32" over the token id, keyed twice by a hash of
    (seed, position). Integer arithmetic only, so every device gives the same bits.
    """
    key = _key(seed, position)
    return _gumbel(key & _MASK32, key >> 32, token_ids)


def _gumbel(low: int | Tensor, high: int | Tensor, token_ids: Tensor) -> Tensor:
    """The noise of ``token_ids`` under the halves of a key, or of a column of keys."""
    x = _mix(_mix(token_ids ^ low) ^ high)
    uniform = (x.double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform))


def _key(seed: int, position: int) -> int:
    return _splitmix64(_splitmix64(seed) + position)


def _splitmix64(x: int) -> int:
    """The SplitMix64 step: neighbouring integers become unrelated 64-bit keys."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser on int64 tensors holding 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The target's choice rule of one reply: processors, then argmax (``seed`` None) or a draw keyed by ``seed``."""

    processors: LogitsProcessorList
    seed: int | None

    @property
    def is_argmax(self) -> bool:
        """True where the choice is the argmax of the raw logits: all nodes can be chosen at once."""
        return self.seed is None and not self.processors

    @property
    def is_blind(self) -> bool:
        """True where the choice does not depend on the text before it, but for its length."""
        return all(type(processor) in _BLIND for processor in self.processors)

    @property
    def draws_at_once(self) -> bool:
        """True where `draw` serves: the choice depends on how long the text before it is and how often it holds each token."""
        return all(type(processor) in (*_BLIND, *_COUNTING) and not _is_per_text(processor) for processor in self.processors)

    def draw(self, logits: Tensor, positions: Sequence[int], texts: Tensor) -> tuple[Tensor, Tensor]:
        """All choices at once: `choose` for each row of ``logits`` [N, V], whose token will stand at its position.

        Their scores [N] float32 and tokens [N]; a score that is not a number stands for `NO_TOKEN`.

        ``texts`` [N, L] int64: the tokens before each, filled up with V, which is no token's id; [N, 0] serves where the
        processors are blind to them. Only for a sampler that `draws_at_once`. Nothing waits for the device.
        """
        rows = max(len(logits), 2)  # a lone row would meet other CUDA kernels, rounding apart
        copy = logits.expand(rows, -1).to(torch.float32, copy=True)
        scores: Tensor = self.processors(texts.expand(rows, -1), copy)[: len(logits)]
        if self.seed is None:
            best, tokens = scores.max(-1)
            return best, tokens
        different, place = np.unique(positions, return_inverse=True)  # nodes of one depth have one noise: it is made once
        keys = [_key(self.seed, position) for position in different.tolist()]
        halves = np.array([[key & _MASK32 for key in keys], [key >> 32 for key in keys]], np.int64)
        low, high = to_device(halves[:, :, None], logits.device)
        noise = _gumbel(low, high, torch.arange(logits.shape[1], device=logits.device))[to_device(place, logits.device)]
        best, tokens = (scores.double() + noise).max(-1)
        return best.float(), tokens

    def choose(self, logits: Tensor, input_ids: Tensor) -> int:
        """The token after ``input_ids`` [1, L], whose last position gave ``logits`` [V]; it will stand at position L."""
        best, token = self.perturbed(logits, input_ids).max(-1)
        return int(token.masked_fill(best.isnan(), NO_TOKEN))

    def perturbed(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Processed scores [V] plus, when sampling, the noise of position L: the token drawn is their argmax."""
        scores: Tensor = self.processors(input_ids, logits[None].to(torch.float32, copy=True))[0]
        if self.seed is None:
            return scores
        if scores.device.type == "mps":  # which has no float64
            scores = scores.cpu()
        kept = torch.isfinite(scores).nonzero()[:, 0]  # what top-k, top-p and min-p left over
        drawn = scores.double()
        drawn[kept] += gumbel_noise(self.seed, input_ids.shape[1], kept)
        return drawn


class PresencePenaltyProcessor(LogitsProcessor):  # type: ignore[misc]
    """Subtract ``penalty`` once from the score of every token that the reply already contains (not the prompt).

    transformers has a repetition penalty but no presence penalty; this is the one known from the OpenAI API.
    """

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalised ``scores`` [B, V] for the reply part of ``input_ids`` [B, L]."""
        reply = input_ids[:, self.prompt_length :]
        padded = torch.nn.functional.pad(scores, (0, 1))  # for the id V, as in transformers' repetition penalty
        return padded.scatter(1, reply, padded.gather(1, reply) - self.penalty)[:, :-1]


class FrequencyPenaltyProcessor(LogitsProcessor):  # type: ignore[misc]
    """Subtract ``penalty`` from the score of every token as often as the reply already contains it (not the prompt).

    As `PresencePenaltyProcessor`, the one known from the OpenAI API.
    """

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalised ``scores`` [B, V] for the reply part of ``input_ids`` [B, L]."""
        reply = input_ids[:, self.prompt_length :]
        counts = scores.new_zeros(len(scores), scores.shape[1] + 1)  # one column more for the id V
        counts.scatter_add_(1, reply, scores.new_ones(()).expand(reply.shape))
        return scores - self.penalty * counts[:, :-1]


_COUNTING = (FrequencyPenaltyProcessor, PresencePenaltyProcessor, RepetitionPenaltyLogitsProcessor)
"""Processors to which a text is how often each token occurs in it; the id V stands for none."""


def _is_per_text(processor: LogitsProcessor) -> bool:
    """Whether a repetition penalty ignores a prompt of a length of its own for each text: as many texts as it has lengths."""
    return isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
