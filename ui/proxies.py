"""Proxies of the environment: what is on this machine is reached without them. Import it before Gradio, which reads them."""

from __future__ import annotations

import os
from urllib.request import getproxies

import httpx


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
