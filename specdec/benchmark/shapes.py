"""Models of a given shape with random weights: what a pass costs needs no download. What they say means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from specdec.devices import choose_device, choose_dtype, place_weights
from specdec.errors import LoadError, first_line

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Shapes by name; every other one comes from a config.json."""


def random_model(shape: str, device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random model of the ``shape`` (a name of `SHAPES`, a config.json or its folder), and a tokenizer of bytes.

    Raises LoadError.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    auto: Any = AutoModelForCausalLM  # its methods are untyped
    config = _config(shape)
    try:
        with torch.device("meta"):
            skeleton = auto.from_config(config)
        if place_weights(shape, sum(weight.numel() for weight in skeleton.parameters()), kind, place) == "auto":
            raise LoadError(f"{shape} does not fit on one GPU, and is timed on one only: name a smaller shape.")
        torch.manual_seed(0)
        with place:
            model = auto.from_config(config, dtype=kind, attn_implementation="sdpa" if skeleton._supports_sdpa else "eager")
    except ValueError as error:
        raise LoadError(f"{shape} is no shape of a causal language model ({first_line(error)}): name another one.") from error
    return model.eval().requires_grad_(False), _bytes()


def _config(shape: str) -> PreTrainedConfig:
    if shape in SHAPES:
        return (Qwen2Config if shape.startswith("qwen") else LlamaConfig)(**SHAPES[shape])
    if not Path(shape).exists():
        raise LoadError(f"--random-weights {shape} is neither a config.json nor one of {', '.join(SHAPES)}.")
    try:
        return AutoConfig.from_pretrained(shape)
    except (ValueError, OSError) as error:
        raise LoadError(f"{shape} is no usable config.json ({first_line(error)}): name another one.") from error


def _bytes() -> PreTrainedTokenizerFast:
    """Every byte a token; ids beyond have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
