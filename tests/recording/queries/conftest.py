"""Nodes that answer, and one that does not."""

import socket

import pytest
from tests.recording.queries.node_servers import NODES


@pytest.fixture
def paths(data_dir):
    return [data_dir / "agent_dbs" / name for name in NODES]


@pytest.fixture
def dead():
    """An address on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
