"""Where things are kept on the user's disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from transformers import PreTrainedModel


def cache_folder() -> Path:
    """``SPECDEC_CACHE``, else ``specdec`` in the user's cache folder."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("SPECDEC_CACHE") or Path(shared, "specdec")).expanduser()


def model_file(kind: str, model: PreTrainedModel) -> Path:
    """The file of ``kind`` ("memory", "vocabulary") that belongs to this very model, whatever it is called.

    A model is known by its class and by a few weights of every tensor, so that a fine-tuned one has files of its own.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weights in model.named_parameters():
        digest.update(name.encode())
        digest.update(weights.detach().flatten()[:8].float().cpu().numpy().round(3).tobytes())
    return cache_folder() / kind / f"{digest.hexdigest()[:16]}.npz"
