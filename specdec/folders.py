"""Where things are kept on the user's disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

SHIPPED = Path(__file__).parent / "studied"
"""Studies that come with the package: what ``python -m specdec.benchmark --study`` left in the cache folder."""


def cache_folder() -> Path:
    """``SPECDEC_CACHE``, else ``specdec`` in the user's cache folder."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("SPECDEC_CACHE") or Path(shared, "specdec")).expanduser()


def model_file(kind: str, model: PreTrainedModel) -> Path:
    """The file of ``kind`` ("memory", "vocabulary") that belongs to this very model, whatever it is called.

    A model is known by its class and by a few weights of every tensor, so that a fine-tuned one has files of its own, and the
    same one in another number format has not.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weights in model.named_parameters():
        digest.update(name.encode())
        digest.update(weights.detach().flatten()[:8].to(torch.bfloat16).float().cpu().numpy().round(3).tobytes())
    for name, weights in _quantised(model):
        digest.update(name.encode())
        digest.update(weights.detach().flatten()[:8].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return cache_folder() / kind / f"{digest.hexdigest()[:16]}.npz"


def _quantised(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are saved with the model, which is where quantised weights are."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def studied_file(name: str) -> Path:
    """The file called ``name`` (`model_file`'s of kind "vocabulary"): the user's own, else the one that is shipped."""
    own, shipped = cache_folder() / "vocabulary" / name, SHIPPED / name
    return shipped if shipped.exists() and not own.exists() else own
