"""GgufFile: what a ``.gguf`` file says about the forward pass beyond what transformers reads of it.

transformers takes the sizes and the weights that it knows and passes over the rest, so that a model with scaled positions, say,
would load and write another text than it should. Here every such setting and every tensor is honoured or refused by its name.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from specdec.errors import LoadError

_ROPE_FACTORS = "rope_freqs.weight"
"""Divides the frequencies of the rotary embedding, one by one."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_HARMLESS = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "pooling_type"}
"""Settings that change no forward pass by themselves."""
_HONOURED = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.freq_base"}
_HONOURED |= {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_(exps|projs)\.")


class GgufFile:
    """The settings and tensors of the file at ``path``. Raises whatever `GGUFReader` finds broken."""

    def __init__(self, path: str | Path) -> None:
        reader = GGUFReader(path)
        self._path = path
        self._architecture = str(reader.fields["general.architecture"].contents())
        start = f"{self._architecture}."
        self._settings: dict[str, Any] = {
            key.removeprefix(start): field.contents() for key, field in reader.fields.items() if key.startswith(start)
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def settle(self, config: PreTrainedConfig) -> None:
        """Let ``config``, as transformers made it, say what the file says. Raises LoadError for what it cannot say."""
        rope = self._rope(config)
        if rope:
            config.rope_parameters = {**config.rope_parameters, **rope}
        known = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), {})
        if "head_dim" not in known.values() and hasattr(config, "head_dim"):
            config.head_dim = self._settings.get("attention.key_length", config.head_dim)
        expected = _expected(config)
        for name, value in self._settings.items():
            if known.get(name) or name in _HARMLESS | _HONOURED:
                continue
            if name == "attention.sliding_window" and value >= config.max_position_embeddings:  # it hides nothing
                continue
            own = expected.get(name)
            if not (_is_neutral(name, value) if own is None else _is_close(value, own)):
                raise self._refusal(f"{self._architecture}.{name} = {str(value)[:40]}")

    def check_weights(self, skeleton: PreTrainedModel) -> None:
        """Raise LoadError for a tensor that ``skeleton``, the model without its weights, has no place for."""
        processor = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)(config={})
        places = get_gguf_hf_weights_map(skeleton, processor)
        for name in self._tensors:
            if name not in places and name not in (_ROPE_FACTORS, "output.weight") and not _EXPERTS.search(name):
                raise self._refusal(f"the tensor {name}")

    def scale_positions(self, model: PreTrainedModel) -> None:
        """Divide the frequencies of ``model``'s rotary embedding, where the file says by what."""
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return
        factors = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        frequencies: dict[int, Tensor] = {
            buffer.data_ptr(): buffer
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in ("inv_freq", "original_inv_freq")
        }
        if not frequencies or any(buffer.shape != factors.shape for buffer in frequencies.values()):
            raise self._refusal(f"the tensor {_ROPE_FACTORS}")
        for buffer in frequencies.values():
            buffer.div_(factors.to(buffer.device, buffer.dtype))

    def _rope(self, config: PreTrainedConfig) -> dict[str, Any]:
        """What the file says of rotary positions and ``config`` does not."""
        settings, own = self._settings, getattr(config, "rope_parameters", None) or {}
        kind = settings.get("rope.scaling.type", "linear")
        factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0)) or 1
        if any(isinstance(value, dict) for value in own.values()):  # of each kind of layer
            if kind != "none" and factor != 1:
                raise self._refusal(f"{self._architecture}.rope.scaling.factor = {factor}")
            return {}
        rope = {"rope_theta": settings["rope.freq_base"]} if "rope.freq_base" in settings and "rope_theta" in own else {}
        if kind == "none" or own.get("rope_type", "default") != "default" or (kind == "linear" and factor == 1):
            return rope
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = settings.get("rope.scaling.original_context_length", config.max_position_embeddings)
            rope |= {"original_max_position_embeddings": original}
            betas = {f"beta_{name}": settings.get(f"rope.scaling.yarn_beta_{name}") for name in ("fast", "slow")}
            rope |= {name: value for name, value in betas.items() if value is not None}
        elif kind != "linear":
            raise self._refusal(f"{self._architecture}.rope.scaling.type = {kind}")
        return rope

    def _refusal(self, what: str) -> LoadError:
        return LoadError(
            f"{self._path} asks for {what}, which transformers does not take from a .gguf file: give --model the folder with "
            "the model's original weights."
        )


def _expected(config: PreTrainedConfig) -> dict[str, Any]:
    """What settings that transformers does not read would have to be, for ``config`` to say the same."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    epsilon = next((getattr(config, name) for name in _EPSILONS if hasattr(config, name)), None)
    attributes = {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "use_parallel_residual": "use_parallel_residual",
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
    }
    return {name: getattr(config, attribute, None) for name, attribute in attributes.items()} | {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": epsilon,
        "attention.layer_norm_rms_epsilon": epsilon,
        "attention.causal": True,
    }


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a setting asks for nothing: no window, no cap, no experts, a factor of one."""
    return value in (0, "", "none") or (value == 1 and name.endswith(("scale", "factor")))


def _is_close(value: Any, expected: Any) -> bool:
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-5)  # the file's numbers have 32 bits
    return bool(value == expected)
