"""Request: one call's arguments, checked and resolved against the model's generation config before anything runs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.errors import first_line
from specdec.prompt import Message, Prompt, PromptError, encode, fair_share
from specdec.sampling import FrequencyPenaltyProcessor, PresencePenaltyProcessor, Sampler

Decoding = Literal["tree", "linear", "plain"]
Budget = int | Literal["auto"]

log = logging.getLogger(__name__)

MAX_BUDGET = 64
"""The most nodes besides the root that one pass verifies."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "do_sample"), False),
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config", "stop_strings")),
    "max_time": None,
    **dict.fromkeys(("temperature", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    "top_h": None,
}
"""Settings of a generation config that change what a reply says, and the values with which they change nothing."""
_COLDEST = 1e-6
"""The least temperature at which a reply is sampled: below, only ties could be drawn, and logits overflow."""
_SAMPLING = {"temperature", "top_p", "typical_p", "top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
"""Those of them that act on sampled replies only."""
_UNSUPPORTED = {
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


class _Kind(NamedTuple):
    """What an argument may be: whether a value is, and in words."""

    holds: Callable[[Any], bool]
    words: str


def _number(kind: type[Any], words: str, least: float = -inf, most: float = inf) -> _Kind:
    return _Kind(lambda value: isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most, words)


def _some(kind: type | UnionType, words: str) -> _Kind:
    """One, or a list of them."""
    return _Kind(
        lambda value: all(isinstance(one, kind) for one in (value if isinstance(value, list | tuple) else [value])), words
    )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(token, int) and token >= 0 for token in value)


_BUDGET = _number(Integral, f'"auto" or a whole number from 0 to {MAX_BUDGET}', 0, MAX_BUDGET)
_CALLABLES = _Kind(lambda value: isinstance(value, list | tuple) and all(map(callable, value)), "a list of functions")
_KINDS = {
    "decoding": _Kind(get_args(Decoding).__contains__, "tree, linear or plain"),
    "budget": _BUDGET._replace(holds=lambda value: value == "auto" or _BUDGET.holds(value)),
    "seed": _number(Integral, "a whole number"),
    "presence_penalty": _number(Real, "a number"),
    "frequency_penalty": _number(Real, "a number"),
    "logprobs": _number(Integral, "a whole number, at least 0", 0),
    "prediction": _Kind(lambda value: isinstance(value, str) or _is_token_ids(value), "a text or a list of token ids"),
    "cancelled": _Kind(callable, "a function"),
    "generation_config": _Kind(lambda value: isinstance(value, GenerationConfig), "a GenerationConfig of transformers"),
    "streamer": _Kind(lambda value: hasattr(value, "put") and hasattr(value, "end"), "a streamer of transformers"),
    "do_sample": _Kind(lambda value: isinstance(value, bool), "True or False"),
    "stop_strings": _some(str, "a text or a list of texts"),
    "eos_token_id": _some(Integral | torch.Tensor, "a token id or a list of them"),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), _CALLABLES),
    **dict.fromkeys(("max_new_tokens", "max_length"), _number(Integral, "a whole number, at least 1", 1)),
    **dict.fromkeys(
        ("min_new_tokens", "min_length", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        _number(Integral, "a whole number, at least 0", 0),
    ),
    "temperature": _number(Real, "a finite number, at least 0", 0, torch.finfo(torch.float32).max),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), _number(Real, "a number, at least 0", 0)),
    **dict.fromkeys(
        ("top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _number(Real, "a number from 0 to 1", 0, 1)
    ),
}
"""Of the arguments of a call, those whose wrong values nobody else refuses by name."""


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
    logprobs: int | None
    """How many of the target's most probable tokens `specdec.step.Step.logprobs` shows in each place; None: there is none."""
    prediction: tuple[int, ...]
    """What the reply is expected to be like: a text to copy guesses from."""
    cancelled: Callable[[], bool]
    owner: Hashable
    """Whose text it is: see `specdec.conversation.Text`."""
    streamer: Any
    """A streamer of transformers, or None."""


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
    frequency_penalty: float = 0.0,
    details: bool = False,
    logprobs: int | None = None,
    prediction: str | Sequence[int] = (),
    cancelled: Callable[[], bool] = lambda: False,
    owner: Hashable = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    **generation: Any,
) -> Request:
    """Check the arguments of `SpeculativeEngine.stream`. Raises RequestError or PromptError."""
    needed = {"decoding": decoding, "budget": budget, "seed": seed, "cancelled": cancelled, "prediction": prediction}
    optional = {
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer,
        **getattr(generation_config, "__dict__", {}),
        **generation,
    }
    _check(needed | {name: value for name, value in optional.items() if value is not None})
    for name, neutral in _UNSUPPORTED.items():
        given = generation.get(name, getattr(generation_config, name, None))
        if given not in (None, neutral):
            raise RequestError(f"{name}={given} is not supported: the engine decodes one sequence, greedily or by sampling")
    config = _merged(model, generation_config, generation)

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

    expected = tuple(tokenizer.encode(prediction, add_special_tokens=False) if isinstance(prediction, str) else prediction)
    if max(expected, default=0) >= vocab_size:
        raise RequestError(f"prediction holds a token id outside the model's vocabulary of {vocab_size} tokens")

    if generation.get("eos_token_id") is None and getattr(generation_config, "eos_token_id", None) is None:
        ends = config.eos_token_id if isinstance(config.eos_token_id, list | tuple) else [config.eos_token_id]
        config.eos_token_id = sorted({end for end in (*ends, *encoded.ends) if end is not None and end < vocab_size}) or None
    own = LogitsProcessorList(logits_processor or [])
    if presence_penalty:  # like every penalty before temperature, top-k and top-p
        own.append(PresencePenaltyProcessor(presence_penalty, length))
    if frequency_penalty:
        own.append(FrequencyPenaltyProcessor(frequency_penalty, length))
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
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(first_line(error)) from error
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time))
    eos = set() if config._eos_token_tensor is None else set(config._eos_token_tensor.tolist())
    strings = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
    special = {string for string in strings if string in tokenizer.all_special_tokens}  # which text does not show
    return Request(
        prompt=encoded,
        decoding=decoding,  # type: ignore[arg-type]
        budget=budget if budget == "auto" else int(budget),
        sampler=Sampler(processors, int(seed) if config.do_sample else None),
        max_new_tokens=limit,
        length_reason="context" if limit == room else "length",
        eos_token_ids=frozenset(eos | {tokenizer.convert_tokens_to_ids(string) for string in special}),
        stop_strings=tuple(string for string in strings if string not in special),
        stopping_criteria=criteria,
        details=details,
        logprobs=logprobs,
        prediction=expected,
        cancelled=cancelled,
        owner=owner,
        streamer=streamer,
    )


def acting_settings(model: PreTrainedModel, **arguments: Any) -> dict[str, Any]:
    """The settings of ``model``'s generation config that change a reply asked for with ``arguments``, by name.

    Each can be overridden: pass another value for it, or its value in `NEUTRAL`, with which it changes nothing.
    Raises RequestError.
    """
    given = {name: value for name, value in arguments.items() if name in NEUTRAL}
    config = _merged(model, None, given)
    return {
        name: value
        for name, neutral in NEUTRAL.items()
        if name not in given
        and (config.do_sample or name not in _SAMPLING)
        and (value := getattr(config, name, None)) not in (None, neutral)
    }


def ignored_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of ``model``'s generation config that ask for another kind of decoding; replies leave them out."""
    config = model.generation_config
    return {
        name: value for name, neutral in _UNSUPPORTED.items() if (value := getattr(config, name, None)) not in (None, neutral)
    }


def _merged(model: PreTrainedModel, generation_config: GenerationConfig | None, arguments: dict[str, Any]) -> GenerationConfig:
    """What the caller asks for, then ``generation_config``, then the model's own, as in generate. Raises RequestError."""
    if ignored := ignored_settings(model):
        _notify(" and ".join(f"{name}={value}" for name, value in ignored.items()), model.name_or_path or type(model).__name__)
        model, own = copy.copy(model), copy.deepcopy(model.generation_config)
        for name in ignored:
            setattr(own, name, _UNSUPPORTED[name])
        model.generation_config = own
    try:
        config, unknown = model._prepare_generation_config(generation_config, **arguments)
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(first_line(error)) from error
    if unknown:
        raise RequestError(f"unknown argument {', '.join(sorted(unknown))}; arguments are those of transformers' generate")
    config.do_sample = bool(config.do_sample and (config.temperature is None or config.temperature >= _COLDEST))
    return config


@cache
def _notify(settings: str, name: str) -> None:
    log.warning("%s in the generation config of %s is left out: the engine decodes one sequence.", settings, name)


def _check(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        kind = _KINDS.get(name)
        if kind is not None and not kind.holds(value):
            shown = " ".join(f"{name}={value!r}".split())[:80]
            raise RequestError(f"{shown} cannot be used: pass {kind.words}")
