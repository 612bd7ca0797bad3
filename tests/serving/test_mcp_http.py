"""MCP over HTTP whose SDK is imported for the first request."""

import subprocess
import sys
from contextlib import asynccontextmanager
from importlib.util import find_spec

import anyio
import pytest

from ingero.errors import UnsupportedError
from ingero.serving import mcp_http
from ingero.serving.mcp_http import McpOverHttp

SERVERS = ("ingero.echo.service.app", "ingero.recording.queries.https_server")
SDK = "mcp"


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_starts_without_the_sdk(server):
    code = (
        f"import sys, {server}; print([name for name in sys.modules if name.startswith({SDK!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Manager:
    """Says what happens to it."""

    def __init__(self):
        self.said = []

    @asynccontextmanager
    async def run(self):
        self.said.append("opened")
        try:
            yield
        finally:
            self.said.append("closed")

    async def handle_request(self, scope, _receive, _send):
        self.said.append(scope["path"])


def ask(mcp, *paths):
    """Ask at once for each path, inside and not after `run`; the errors."""
    errors = []

    async def one(path):
        try:
            await mcp.handle_request({"path": path}, None, None)
        except ImportError as error:
            errors.append(str(error))

    async def main():
        with anyio.fail_after(60):
            async with mcp.run(), anyio.create_task_group() as tasks:
                for path in paths:
                    tasks.start_soon(one, path)

    anyio.run(main)
    return errors


def test_one_manager_answers_every_request_and_is_closed_at_the_end():
    managers, loads = [], []

    def build():
        managers.append(Manager())
        return managers[-1]

    def load():
        loads.append("loaded")
        return build

    assert ask(McpOverHttp(load), "/a", "/b") == []
    assert loads == ["loaded"]
    (manager,) = managers
    assert (manager.said[0], manager.said[-1]) == ("opened", "closed")
    assert sorted(manager.said[1:-1]) == ["/a", "/b"]


def test_nothing_is_loaded_where_nobody_asks():
    def load():
        raise AssertionError

    assert ask(McpOverHttp(load)) == []


def test_each_request_fails_where_the_sdk_cannot_be_imported():
    def load():
        raise ImportError("half of it is missing")

    assert ask(McpOverHttp(load), "/a", "/b") == ["half of it is missing"] * 2


def test_a_server_without_the_sdk_says_what_to_install(monkeypatch):
    assert find_spec(SDK) is not None
    monkeypatch.setitem(sys.modules, SDK, None)
    with pytest.raises(UnsupportedError) as raised:
        McpOverHttp(lambda: Manager)
    assert SDK in raised.value.message
    assert raised.value.hint == f"pip install {mcp_http._SDK}"
