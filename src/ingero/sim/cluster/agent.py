"""The agent process of one host: reads its settings from the command line, reports that it is ready."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSettings
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.service import AgentSettings
from ingero.agent.health.signals.machine import MachineSettings
from ingero.agent.health.spill import SpillSettings
from ingero.agent.health.transport import TransportSettings
from ingero.agent.push.live import LiveAgent, LiveSettings
from ingero.closing import set_in_handler
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.serving.ready import report_ready
from ingero.sim.cluster.simulated_agent import SimulatedAgent
from ingero.units import NS_PER_S

_WARMUP: Final = 3


def build_trace(settings: dict[str, Any]) -> TraceSettings:
    """The probes on the host's rank."""
    return TraceSettings(
        engine=EngineSettings(host_probes=("process",)),
        pids=(settings["pid"],),
        files=tuple(map(Path, settings["files"])),
    )


def build_health(settings: dict[str, Any]) -> AgentSettings:
    """Who the host is and where its Fleet is."""
    rank, push_ns = settings["rank"], settings["push_interval_ns"]
    fleets = settings["fleets"]
    first = rank % len(fleets)
    endpoints = [
        parse_endpoint(fleet, is_insecure=True, option="--fleet")
        for fleet in (*fleets[first:], *fleets[:first])
    ]
    return AgentSettings(
        identity=NodeIdentity(
            cluster_id=settings["cluster_id"],
            node_id=settings["node_id"],
            workload_type="training",
            world_size=settings["n_ranks"],
            rank=rank,
        ),
        transport=TransportSettings(
            endpoint=endpoints[0],
            others=tuple(endpoints[1:]),
            cluster_id=settings["cluster_id"],
            timeout_ns=min(push_ns, 5 * NS_PER_S),
            is_protobuf=True,
        ),
        loop=LoopSettings(push_interval_ns=push_ns, machine=MachineSettings(warmup=_WARMUP)),
        persist_path=Path(settings["folder"]) / f"baseline-{rank}.json",
        socket_path=Path(settings["socket"]),
        spill=SpillSettings(Path(settings["folder"]) / f"spill-{rank}"),
    )


def build_agent(
    settings: dict[str, Any], on_ready: Callable[[], None]
) -> LiveAgent | SimulatedAgent:
    """The agent that `ingero.sim.cluster.agents` asks for."""
    health = build_health(settings)
    if settings["report"]:
        return SimulatedAgent(
            health, settings["pid"], settings["rank"], Path(settings["report"]), on_ready
        )
    return LiveAgent(LiveSettings(build_trace(settings), health), on_ready=lambda _: on_ready())


def main() -> None:
    """Run until a signal comes."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: set_in_handler(stop))
    agent = build_agent(json.loads(sys.argv[1]), lambda: report_ready("ingero-agent", {}))
    agent.run(stop)
