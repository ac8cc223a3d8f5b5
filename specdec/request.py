"""Request: one call's arguments, checked and resolved against the model's generation config before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.prompt import Message, Prompt, PromptError, encode, fair_share
from specdec.sampling import PresencePenaltyProcessor, Sampler

Decoding = Literal["tree", "linear", "plain"]
Budget = int | Literal["auto"]

MAX_BUDGET = 64
"""The most nodes besides the root that one pass verifies."""
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
}
"""Arguments of generate that ask for another kind of decoding, and the values that ask for none."""


class RequestError(ValueError):
    """An argument that cannot be honoured; the message names it and what to pass instead."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one reply is asked for."""

    prompt: Prompt
    decoding: Decoding
    budget: Budget
    sampler: Sampler
    max_new_tokens: int
    length_reason: Literal["length", "context"]
    """Why a reply of ``max_new_tokens`` ends there: it was asked to, or the model's context is full."""
    eos_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    stopping_criteria: StoppingCriteriaList
    details: bool
    cancelled: Callable[[], bool]


def resolve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context_limit: int,
    prompt: str | Sequence[Message] | Sequence[int] | Prompt,
    *,
    decoding: str = "tree",
    budget: Budget = "auto",
    seed: int = 0,
    presence_penalty: float = 0.0,
    details: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    **generation: Any,
) -> Request:
    """Check the arguments of `SpeculativeEngine.stream`. Raises RequestError or PromptError."""
    if decoding not in get_args(Decoding):
        raise RequestError(f"decoding={decoding!r} is unknown; choose one of {', '.join(get_args(Decoding))}")
    if budget != "auto" and not (isinstance(budget, int) and 0 <= budget <= MAX_BUDGET):
        raise RequestError(f'budget={budget!r} is not a node budget; pass "auto" or a number of nodes from 0 to {MAX_BUDGET}')
    if not isinstance(seed, int):
        raise RequestError(f"seed={seed!r} is not an integer")
    for name, value in generation.items():
        if name in ("max_new_tokens", "max_length") and value is not None and value < 1:
            raise RequestError(f"{name}={value} leaves nothing to generate; pass at least 1")
        if name in ("top_p", "min_p") and value is not None and not 0 <= value <= 1:
            raise RequestError(f"{name}={value} is not a probability; pass a number from 0 to 1")
    try:
        config, unknown = model._prepare_generation_config(generation_config, **generation)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if unknown:
        raise RequestError(f"unknown argument {', '.join(sorted(unknown))}; arguments are those of transformers' generate")
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in (None, neutral):
            raise RequestError(
                f"{name}={getattr(config, name)} is not supported: the engine decodes one sequence, greedily or by sampling"
            )

    encoded = encode(tokenizer, prompt, context_limit - 1, fair_share(config.max_new_tokens, context_limit))
    length, vocab_size = len(encoded.token_ids), model.config.get_text_config(decoder=True).vocab_size
    if min(encoded.token_ids) < 0 or max(encoded.token_ids) >= vocab_size:
        raise PromptError(f"the prompt holds a token id outside the model's vocabulary of {vocab_size} tokens")
    room = limit = context_limit - length
    lengths = (generation.get("max_length"), getattr(generation_config, "max_length", None), model.generation_config.max_length)
    if config.max_new_tokens is not None:
        limit = min(limit, config.max_new_tokens)
    elif any(given is not None for given in lengths):
        limit = min(limit, config.max_length - length)
        if limit < 1:
            raise RequestError(f"max_length={config.max_length} is no longer than the prompt of {length} tokens")
    config.max_length = length + limit
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens

    own = LogitsProcessorList(logits_processor or [])
    if presence_penalty:  # like every penalty before temperature, top-k and top-p
        own.append(PresencePenaltyProcessor(presence_penalty, length))
    try:
        model._prepare_special_tokens(config, device=model.device)
        processors = model._get_logits_processor(
            config,
            input_ids_seq_length=length,
            encoder_input_ids=torch.tensor([encoded.token_ids], device=model.device),  # what generate passes: the prompt
            logits_processor=own,
            device=model.device,
            model_kwargs={},
        )
    except ValueError as error:
        raise RequestError(str(error)) from error
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time))
    eos = set() if config._eos_token_tensor is None else set(config._eos_token_tensor.tolist())
    strings = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
    special = {string for string in strings if string in tokenizer.all_special_tokens}  # which text does not show
    return Request(
        prompt=encoded,
        decoding=decoding,  # type: ignore[arg-type]
        budget=budget,
        sampler=Sampler(processors, seed if config.do_sample else None),
        max_new_tokens=limit,
        length_reason="context" if limit == room else "length",
        eos_token_ids=frozenset(eos | {tokenizer.convert_tokens_to_ids(string) for string in special}),
        stop_strings=tuple(string for string in strings if string not in special),
        stopping_criteria=criteria,
        details=details,
        cancelled=cancelled,
    )
