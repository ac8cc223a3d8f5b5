"""What the environment says: whether this is a Hugging Face Space, and which proxies there are.

Import it first: `spaces` must come before anything that may initialise CUDA, and Gradio reads the proxies as it is imported.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.request import getproxies

import httpx

from specdec.zerogpu import gpu_is_lent

ON_SPACE = "SPACE_ID" in os.environ
"""The page is served by Hugging Face, to anybody."""
ON_ZEROGPU = gpu_is_lent()
"""No process keeps a GPU: each call of a function decorated with `GPU` gets one, in a forked child of its own."""

if ON_ZEROGPU:
    from spaces import GPU as GPU
else:

    def GPU(task: Any = None, *, duration: Any = None) -> Any:
        """Stands in for `spaces.GPU` where it would change nothing: ``@GPU`` and ``@GPU(duration=...)``."""
        del duration
        return task if callable(task) else lambda function: function


def bypass(*hosts: str) -> None:
    """Reach this machine, and ``hosts``, without a proxy: Gradio checks its own page over HTTP when it starts."""
    asked = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    known = [host.strip() for host in asked.split(",") if host.strip()]
    wanted = ["localhost", "127.0.0.1", "::1", *(host for host in hosts if host)]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*known, *(host for host in wanted if host not in known)])


def unusable() -> str:
    """Why the proxies of the environment keep Gradio from being imported; "" if they do not."""
    if not getproxies():
        return ""
    try:
        httpx.Client().close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        return f"the proxy that http_proxy, https_proxy or all_proxy names cannot be used: {error}"
    return ""
