"""Request: one call's arguments, checked and resolved against the model's generation config before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.prompt import Message, Prompt, encode
from specdec.sampling import PresencePenaltyProcessor, Sampler

Decoding = Literal["tree", "linear", "plain"]
Budget = int | Literal["auto"]

MAX_BUDGET = 64
"""The most nodes besides the root that one pass verifies."""


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
        config, unknown = model._prepare_generation_config(None, **generation)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if unknown:
        raise RequestError(f"unknown argument {', '.join(sorted(unknown))}; arguments are those of transformers' generate")
    for name, neutral in (("num_beams", 1), ("num_return_sequences", 1), ("guidance_scale", 1)):
        if getattr(config, name, None) not in (None, neutral):
            raise RequestError(f"{name}={getattr(config, name)} is not supported: the engine decodes one sequence")

    encoded = encode(tokenizer, prompt, context_limit - 1)
    length = len(encoded.token_ids)
    room = limit = context_limit - length
    if config.max_new_tokens is not None:
        limit = min(limit, config.max_new_tokens)
    elif generation.get("max_length") is not None or model.generation_config.max_length is not None:
        limit = min(limit, config.max_length - length)
        if limit < 1:
            raise RequestError(f"max_length={config.max_length} is no longer than the prompt of {length} tokens")
    config.max_length = length + limit
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens

    try:
        model._prepare_special_tokens(config, device=model.device)
        processors = model._get_logits_processor(
            config, input_ids_seq_length=length, logits_processor=logits_processor, device=model.device, model_kwargs={}
        )
    except ValueError as error:
        raise RequestError(str(error)) from error
    if presence_penalty:
        processors.append(PresencePenaltyProcessor(presence_penalty, length))
    eos = config._eos_token_tensor
    strings = config.stop_strings
    return Request(
        prompt=encoded,
        decoding=decoding,  # type: ignore[arg-type]
        budget=budget,
        sampler=Sampler(processors, seed if config.do_sample else None),
        max_new_tokens=limit,
        length_reason="context" if limit == room else "length",
        eos_token_ids=frozenset(() if eos is None else eos.tolist()),
        stop_strings=(strings,) if isinstance(strings, str) else tuple(strings or ()),
        stopping_criteria=stopping_criteria or StoppingCriteriaList(),
        details=details,
        cancelled=cancelled,
    )
