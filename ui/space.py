"""The Hugging Face Space, if this is one. Import it first: `spaces` must come before anything that may initialise CUDA."""

from __future__ import annotations

import os
from typing import Any

from specdec.zerogpu import gpu_is_lent

ON_SPACE = "SPACE_ID" in os.environ
"""The page is served by Hugging Face, to anybody."""
ON_ZEROGPU = gpu_is_lent()
"""No process keeps a GPU: each call of a function decorated with `GPU` gets one, in a forked child of its own."""

if ON_ZEROGPU:
    from spaces import GPU
else:

    def GPU(task: Any = None, *, duration: Any = None) -> Any:
        """Stands in for `spaces.GPU` where it would change nothing: ``@GPU`` and ``@GPU(duration=...)``."""
        del duration
        return task if callable(task) else lambda function: function


__all__ = ["GPU", "ON_SPACE", "ON_ZEROGPU"]
