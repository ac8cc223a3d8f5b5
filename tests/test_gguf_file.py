"""What a ``.gguf`` file says about the forward pass is honoured, or refused by its name: never passed over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from ggufs import WORDS, write_gguf
from toys import tiny_model
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specdec.loading import LoadError, load

SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
BASE, FACTOR, ORIGINAL = 500_000.0, 4.0, 16
Settings = Callable[[GGUFWriter], object]


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": BASE, **parameters}}


def llama3_divisors(factor: float, low: float, high: float) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    waves = [2 * math.pi * BASE ** (dim / 8) for dim in range(0, 8, 2)]
    smooth = [(ORIGINAL / wave - low) / (high - low) for wave in waves]
    return np.array([1 / ((1 - share) / factor + share) for share in np.clip(smooth, 0, 1)], np.float32)


def scaled(kind: RopeScalingType, writer: GGUFWriter) -> None:
    writer.add_rope_freq_base(BASE)
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(FACTOR)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL)


def based(writer: GGUFWriter) -> None:
    writer.add_rope_freq_base(BASE)


def with_divisors(writer: GGUFWriter) -> None:
    based(writer)
    writer.add_tensor("rope_freqs.weight", llama3_divisors(8.0, 1.0, 4.0))


LINEAR, YARN = {"rope_type": "linear", "factor": FACTOR}, {"rope_type": "yarn", "factor": FACTOR}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HONOURED: dict[str, tuple[str, PreTrainedConfig, Settings]] = {
    "base": ("llama", LlamaConfig(**SIZES, **rope()), based),
    "linear": ("llama", LlamaConfig(**SIZES, **rope(**LINEAR)), lambda w: scaled(RopeScalingType.LINEAR, w)),
    "linear, another model": ("qwen2", Qwen2Config(**SIZES, **rope(**LINEAR)), lambda w: scaled(RopeScalingType.LINEAR, w)),
    "yarn": (
        "llama",
        LlamaConfig(**SIZES, **rope(**YARN, original_max_position_embeddings=ORIGINAL)),
        lambda w: scaled(RopeScalingType.YARN, w),
    ),
    "no scaling": ("llama", LlamaConfig(**SIZES, **rope()), lambda w: scaled(RopeScalingType.NONE, w)),
    "divisors": ("llama", LlamaConfig(**SIZES, **rope(**LLAMA3, original_max_position_embeddings=ORIGINAL)), with_divisors),
    "head size": ("qwen3", Qwen3Config(**SIZES, head_dim=16, **rope()), lambda w: (based(w), w.add_key_length(16))),
}


@pytest.mark.parametrize("name", HONOURED)
def test_a_setting_that_is_honoured_gives_the_logits_of_the_same_weights_configured_so(name: str, tmp_path: Path) -> None:
    architecture, config, settings = HONOURED[name]
    model = tiny_model(config)
    loaded = load(write_gguf(tmp_path / "tiny.gguf", model, architecture, settings), dtype="float32").model
    token_ids = torch.arange(3, 31)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, atol=1e-5, rtol=1e-5)
        for other in {"base", "linear", "yarn", "divisors"} - {name}:  # else the test would prove nothing
            if architecture == "llama" and name != "no scaling":
                different = tiny_model(HONOURED[other][1])
                assert not torch.allclose(loaded(token_ids).logits, different(token_ids).logits, atol=1e-2)


REFUSED: dict[str, Settings] = {
    "llama.attention.sliding_window = 8": lambda w: w.add_sliding_window(8),
    "llama.logit_scale = 0.5": lambda w: w.add_logit_scale(0.5),
    "llama.expert_count = 8": lambda w: w.add_expert_count(8),
    "llama.rope.scaling.type = longrope": lambda w: scaled(RopeScalingType.LONGROPE, w),
    "llama.rope.scaling.attn_factor = 1.5": lambda w: w.add_rope_scaling_attn_factors(1.5),
    "llama.attention.value_length = 4": lambda w: w.add_value_length(4),
    "llama.attention.causal = False": lambda w: w.add_causal_attention(False),
    "llama.something_new = 7": lambda w: w.add_uint32("llama.something_new", 7),
    "the tensor rope_freqs.weight": lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)),
    "the tensor blk.0.attn_q_norm.weight": lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(8, np.float32)),
    "the tensor blk.1.attn_q.bias": lambda w: w.add_tensor("blk.1.attn_q.bias", np.ones(32, np.float32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(LlamaConfig(**SIZES)), settings=REFUSED[what])
    with pytest.raises(LoadError) as refusal:
        load(file, dtype="float32")
    assert str(refusal.value).startswith(f"{file} asks for {what}, which transformers does not take")
    assert "\n" not in str(refusal.value)


NOTHING: dict[str, Settings] = {
    "a window as long as the context": lambda w: w.add_sliding_window(64),
    "no window": lambda w: w.add_sliding_window(0),
    "no experts": lambda w: w.add_expert_count(0),
    "a scale of one": lambda w: w.add_logit_scale(1.0),
    "the size it has": lambda w: (w.add_key_length(8), w.add_value_length(8), w.add_rope_dimension_count(8)),
    "causal": lambda w: w.add_causal_attention(True),
    "a name": lambda w: (w.add_name("tiny"), w.add_tensor_data_layout("Meta AI original pth")),
    "factor one": lambda w: (w.add_rope_scaling_factor(1.0), w.add_rope_scaling_finetuned(True)),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_setting_that_changes_nothing_is_no_reason_to_refuse(what: str, tmp_path: Path) -> None:
    model = tiny_model(LlamaConfig(**SIZES))
    loaded = load(write_gguf(tmp_path / "tiny.gguf", model, settings=NOTHING[what]), dtype="float32").model
    token_ids = torch.arange(3, 31)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, atol=1e-5, rtol=1e-5)
