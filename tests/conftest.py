"""Fixtures that several rooms share."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_tcp_port() -> int:
    """A free port on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
