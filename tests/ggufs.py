"""Tiny ``.gguf`` files, as llama.cpp would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
from transformers import PreTrainedModel

WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "ab", "cd", "abcd"]
F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    architecture: str = "llama",
    settings: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    quantised: str = "nothing",
) -> Path:
    """Write ``model`` with a tokenizer of `WORDS`; weights with ``quantised`` in their name in blocks of 8 bits.

    ``settings`` adds what is not a size.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    settings(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.rsplit(".", 1)[-1])
        if heads and architecture == "llama":  # llama.cpp keeps the two halves of a rotary pair side by side
            weight = weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        kind = Q8 if quantised in name else F32
        data = gguf.quants.quantize(weight.numpy(), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
