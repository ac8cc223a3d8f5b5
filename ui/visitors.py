"""Visitors: who stands behind a request, so that the queue is fair to people and not to tabs."""

from __future__ import annotations

from gradio.context import LocalContext

from ui.space import ON_SPACE


def visitor() -> str | None:
    """The address behind the present event, as far as the server knows it; None where nobody asked, or nobody can be told.

    On a Space every event comes through the platform's proxy, which says for whom. A client may lie to it: it then has its
    turns in the line like anybody else, but more of them.
    """
    request = LocalContext.request.get(None)
    if request is None:
        return None
    if ON_SPACE:
        forwarded: str = request.headers.get("x-forwarded-for", "")
        return forwarded.split(",")[0].strip() or None
    host: str | None = getattr(getattr(request, "client", None), "host", None)
    return host
