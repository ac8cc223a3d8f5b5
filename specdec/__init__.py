"""Tree-speculative decoding for any Hugging Face causal language model."""
