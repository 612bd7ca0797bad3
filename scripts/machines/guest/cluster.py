"""Checks of the way to a Fleet: what the ranks did arrives there, and a slow rank is named."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from typing import Any, Final

from scripts.machines.guest.running import (
    ENVIRONMENT,
    INGERO,
    LIMIT_S,
    CheckError,
    compare,
    run_ingero,
    shorten,
)

from ingero.sim.runner import SimSettings, Simulation
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until

_ENDPOINTS: Final = ("receivers.otlp http", "extensions.ingero_threshold admin")
_N_RANKS: Final = 3
_STEPS: Final = 11
_CLUSTER: Final = "machines"


def _ask(admin: str, page: str) -> dict[str, Any]:
    url = f"http://{admin}/api/v1/admin/{page}"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _find_clusters(admin: str) -> list[Any]:
    found: list[Any] = _ask(admin, "clusters")["clusters"]
    return found


def _find_comms(admin: str) -> list[Any]:
    try:
        found: list[Any] = _ask(admin, f"collectives?cluster_id={_CLUSTER}")["comms"]
    except urllib.error.HTTPError:  # none of this cluster yet
        return []
    return found


def check_push() -> str:
    """`ingero fleet-push` tells a Fleet of each collective of each rank."""
    with run_fleet(build_fleet_config(nccl={})) as fleet:
        push, admin = (fleet.addresses[name] for name in _ENDPOINTS)
        command = [
            *(*INGERO, "fleet-push", "--fleet-endpoint", push, "--fleet-insecure"),
            *("--fleet-cluster-id", _CLUSTER, "--fleet-push-interval", "5s"),
            *("--fleet-protocol", "http/protobuf", "--fleet-timeout", "5s"),
        ]
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as agent:
            try:
                wait_until(lambda: agent.poll() is not None or _find_clusters(admin), LIMIT_S)
                settings = SimSettings("ranks", {"steps": _STEPS, "wait_us": 4_000_000}, _N_RANKS)
                with Simulation(settings) as simulation:
                    accounts = simulation.wait(LIMIT_S)
                comm = f"{accounts[0]['comm_hash']:016x}"
                wait_until(lambda: agent.poll() is not None or comm in _find_comms(admin), LIMIT_S)
            finally:
                agent.send_signal(signal.SIGTERM)
                _, err = agent.communicate(timeout=LIMIT_S)
    if agent.returncode:
        raise CheckError(f"the agent ended with {agent.returncode}: {shorten(err)}")
    return f"communicator {comm} of {_N_RANKS} ranks is known to the Fleet"


def check_up() -> str:
    """`ingero up` names the rank that was made slow, its victims, and nobody else."""
    ended = run_ingero(
        *("up", "--json", "--ranks", _N_RANKS, "--fault", "slow-rank:1:2x"),
        *("--duration", "1200s", "--push-interval", "2s"),  # it ends when the rank is named
    )
    if not ended.out:
        raise CheckError(f"`ingero up` said nothing; {shorten(ended.err)}")
    told = json.loads(ended.out)
    try:
        compare("hosts", told["isolation"], "network namespaces")
        compare("culprits", told["culprits"], [1])
        compare("victims", told["victims"], [0, 2])
        compare("wrongly named", told["wrongly_named"], [])
    except CheckError as error:
        raise CheckError(f"{error}; {ended.out.strip()}") from error
    return "rank 1 is named, ranks 0 and 2 are its victims"
