"""Several nodes are asked at once; one that fails is told apart from one that has nothing."""

import json
import socket
from contextlib import AsyncExitStack

import anyio
import pytest
from click.testing import CliRunner

from ingero.agent.queries.fanout import (
    FanoutSettings,
    NodeAnswer,
    ask_nodes,
    clock_warnings,
    join_rows,
)
from ingero.agent.queries.listen import ListenSettings, open_server
from ingero.cli.main import cli
from ingero.config import Endpoint
from ingero.config.tls import TlsClientConfig
from ingero.errors import ConfigError, RetryableError
from ingero.testing.clock import ManualClock

COUNT = {"sql": "SELECT count(*) AS n FROM events", "limit": 10}
PLAIN = FanoutSettings(tls=TlsClientConfig(insecure=True))
NODES = ("sample-gpu-node-01.db", "sample-gpu-node-02.db")


def among_servers(paths, talk, clock=None, **settings):
    """Serve each recording and run a blocking conversation on a thread."""

    async def main():
        async with AsyncExitStack() as stack:
            chosen = ListenSettings(
                Endpoint("127.0.0.1", 0), has_tls=False, has_mcp=False, **settings
            )
            bound = [
                str(await stack.enter_async_context(open_server(p, chosen, clock))) for p in paths
            ]
            return await anyio.to_thread.run_sync(talk, bound)

    return anyio.run(main)


@pytest.fixture
def paths(data_dir):
    return [data_dir / "agent_dbs" / name for name in NODES]


@pytest.fixture
def dead():
    """An address on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_rows_of_every_node_carry_its_address(paths):
    def talk(nodes):
        return nodes, join_rows(ask_nodes(nodes, "query", COUNT, PLAIN), 10)

    nodes, joined = among_servers(paths, talk)
    assert joined.columns == ["node", "n"]
    assert joined.rows == [[nodes[0], 200], [nodes[1], 200]]
    assert joined.warnings == []


def test_silent_node_is_named_and_the_others_still_answer(paths, dead):
    joined = among_servers(
        paths, lambda nodes: join_rows(ask_nodes([dead, *nodes], "query", COUNT, PLAIN), 10)
    )
    assert len(joined.rows) == 2
    assert [warning.split(": ")[0] for warning in joined.warnings] == [dead]


def test_no_answer_at_all_is_an_error(dead):
    with pytest.raises(RetryableError, match=dead):
        ask_nodes([dead], "query", COUNT, PLAIN)


def test_bearer_is_sent_and_a_wrong_one_is_told(paths):
    def talk(nodes):
        right = ask_nodes(
            nodes, "overview", None, FanoutSettings("s3cret", tls=TlsClientConfig(insecure=True))
        )
        with pytest.raises(RetryableError, match="401"):
            ask_nodes(nodes, "overview", None, PLAIN)
        return right

    assert among_servers(paths, talk, token="s3cret")[0].body["event_count"] == 200


def test_clock_that_is_ahead_is_measured_and_warned_of(paths):
    ours, theirs = ManualClock(), ManualClock()
    theirs.step_wall(250_000_000)
    answers = among_servers(
        paths, lambda nodes: ask_nodes(nodes, "overview", None, PLAIN, ours), clock=theirs
    )
    assert [answer.clock_offset_ms for answer in answers] == [250.0, 250.0]
    assert len(clock_warnings(answers, 10)) == 2
    assert clock_warnings(answers, 300) == []


def test_node_with_other_columns_is_left_out_and_named():
    answers = [
        NodeAnswer("a", body={"columns": ["n"], "rows": [[1]]}),
        NodeAnswer("b", body={"columns": ["m"], "rows": [[2]]}),
    ]
    joined = join_rows(answers, 10)
    assert joined.rows == [["a", 1]]
    assert joined.warnings == ["b: left out, its columns differ"]


def test_plain_http_to_another_machine_is_refused():
    with pytest.raises(ConfigError, match="plain HTTP"):
        ask_nodes(["192.0.2.1:80"], "query", COUNT, PLAIN)


def test_command_prints_rows_of_all_nodes_and_counts_who_answered(paths, dead):
    def talk(nodes):
        arguments = [
            "query",
            "--no-tls",
            "--nodes",
            ",".join([*nodes, dead]),
            COUNT["sql"],
            "--json",
        ]
        return nodes, CliRunner().invoke(cli, arguments, catch_exceptions=False)

    nodes, result = among_servers(paths, talk)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == [{"node": node, "n": 200} for node in nodes]
    assert "from 2 of 3 nodes" in result.stderr
    assert dead in result.stderr
