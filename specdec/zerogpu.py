"""Hugging Face's ZeroGPU, as its environment tells it. Imports nothing: `spaces` must come before whatever initialises CUDA."""

from __future__ import annotations

import os


def gpu_is_lent() -> bool:
    """Whether a GPU comes and goes: only a forked child computes there, for a while, and the CPU merely checks."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
