"""Recordings that several servers of this process answer for, as so many nodes would."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from tests.recording.scenarios.faults import FAULTS

from ingero.config import Endpoint
from ingero.config.tls import TlsClientConfig
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.fanout import (
    FanoutSettings,
    ask_nodes,
)
from ingero.recording.queries.https_server import ListenSettings, open_server
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.serving.query import get_query

COUNT = {"sql": "SELECT count(*) AS n FROM events", "limit": 10}
PLAIN = FanoutSettings(tls=TlsClientConfig(insecure=True))
NODES = ("sample-gpu-node-01.db", "sample-gpu-node-02.db")


def late_rank():
    return FAULTS["late_rank"]().build()


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


def ask_fleet(nodes, **arguments):
    outside = ExternalAccess(lambda path, body: ask_nodes(nodes, path, body, PLAIN))
    context = RecordingFile(Path("unused.db"), outside)
    return json.loads(get_query(QUERIES, "query_fleet").ask(context, arguments))
