"""The Model Context Protocol project's own conformance suite, asked of both MCP servers for all that they declare.

Its scenarios were written for a server with fixtures of its own (tools named test_…, prompts, resources); ours says that
it has no such thing, and that is all that may fail. What a server declares, it must pass.
"""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from tests.echo.service.conftest import ONE
from tests.echo.serving import Served

CACHE = Path(__file__).parents[2] / ".cache/mcp-conformance/node_modules"
SUITE = CACHE / "@modelcontextprotocol/conformance/dist/index.js"
NODES = (*CACHE.glob("node-linux-*/bin/node"), Path("node"))
REVISIONS = ("2025-11-25", "2026-07-28")
PASSED_WHOLE = {
    "2025-11-25": {
        *("server-initialize", "ping", "tools-list", "prompts-list", "dns-rebinding-protection"),
    },
    "2026-07-28": {
        *("tools-list", "prompts-list", "dns-rebinding-protection", "server-sse-multiple-streams"),
        "http-header-validation",
    },
}
UNKNOWN = (
    *("no such tool", "no such prompt", "Method not found", "Not testable", "not found. Available"),
    *("Expected InputRequiredResult", "could not get initial InputRequiredResult"),
)
"""What a check says that wanted one of the suite's fixtures, or a capability that is not declared."""
UNDECLARED = ("tasks-",)
"""Extensions that are run, and that neither server declares."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not SUITE.exists(), reason="no conformance suite: scripts/install_mcp_conformance"
    ),
]


@contextmanager
def node_server(folder):
    """``ingero mcp`` over a recording; gives its port, and the token that it wants: none on loopback."""
    recording = Path(__file__).parents[1] / "data/agent_dbs/pytorch-dataloader-starvation.db"
    program = Path(sys.executable).with_name("ingero")
    command = [program, "mcp", "--db", recording, "--http", "127.0.0.1:0", "--no-tls"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield int(process.stderr.readline().rpartition(":")[2].removesuffix("/mcp\n")), ""
        process.terminate()


@contextmanager
def echo_server(folder):
    with Served(folder, max_in_flight=1000) as echo:  # the suite leaves its streams open
        yield echo.api, ONE


@asynccontextmanager
async def relay(port, token):
    """Passes requests on with a bearer, one a connection: the suite can send none.

    The suite closes a connection, never the relay: Node 22 ends with ``assert(!this.paused)`` where a socket ends before its
    answer's body is read.
    """

    async def copy(reader, writer):
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                writer.write(part)
                await writer.drain()

    async def copy_and_close(reader, writer):
        await copy(reader, writer)
        writer.close()

    async def serve(reader, writer):
        head = await reader.read(65536)
        if head:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
            first, _, rest = head.partition(b"\r\n")
            added = f"\r\nauthorization: Bearer {token}\r\nconnection: close\r\n"
            to_writer.write(first + added.encode() + rest)
            await asyncio.gather(copy_and_close(reader, to_writer), copy(to_reader, writer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask(port, token, revision, folder):
    """Run what a revision requires; checks by scenario."""
    async with relay(port, token) as at:
        command = [str(NODES[0]), str(SUITE), "server", "--url", f"http://127.0.0.1:{at}/mcp"]
        command += ["--requirements", revision, "-o", str(folder)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
    assert "\nTotal: " in said.decode(), f"the suite ended early: {said.decode()}"
    found = {}
    for file in folder.glob("server-*/checks.json"):
        name = re.fullmatch(r"server-(.+)-\d{4}-\d\d-\d\dT.*", file.parent.name)[1]
        found[name] = json.loads(file.read_text())
    assert found, said.decode()
    return found


def is_about_fixtures(check):
    return any(text in check.get("errorMessage", "") for text in UNKNOWN)


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("server", [node_server, echo_server])
def test_all_that_a_server_declares_conforms(server, revision, tmp_path):
    with server(tmp_path) as (port, token):
        scenarios = asyncio.run(ask(port, token, revision, tmp_path / "checks"))
    failed = {
        (name, check["id"]): check.get("errorMessage")
        for name, checks in scenarios.items()
        for check in checks
        if check["status"] == "FAILURE"
        and not name.startswith(UNDECLARED)
        and not is_about_fixtures(check)
    }
    assert failed == {}
    whole = {
        name
        for name, checks in scenarios.items()
        if {c["status"] for c in checks} <= {"SUCCESS", "INFO"}
    }
    assert PASSED_WHOLE[revision] <= whole
    valid = [
        c["status"]
        for checks in scenarios.values()
        for c in checks
        if c["id"] == "wire-schema-valid"
    ]
    assert len(valid) > 25
    assert set(valid) == {"SUCCESS"}
