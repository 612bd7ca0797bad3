"""A real agent whose Fleet is dead for a while, and that is itself killed meanwhile: what Fleet is told in the end."""

import json
import signal
import subprocess
import time
from contextlib import contextmanager

import numpy as np
from tests.support.ports import free_port

from ingero.agent.health.spill import Spill, SpillSettings
from ingero.otlp.codec import decode_export, decode_protobuf
from ingero.otlp.names import ContentType, Signal
from ingero.sim.job import COLLECTIVE, REPORT, WAIT
from ingero.sim.launcher import launch
from ingero.telemetry.clock import SystemClock
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import read_collectives

RANK = 0
COMM = 0xAB


class Steps:
    """A rank that tells its steps in a file, each when it happens."""

    def __init__(self):
        self.seq = 0

    def take_until(self, path, check):
        def step():
            time.sleep(0.02)
            self.seq += 1
            rows = np.zeros(2, REPORT)
            rows["what"], rows["rank"], rows["n_ranks"] = (COLLECTIVE, WAIT), RANK, 2
            rows["mono_ns"], rows["duration_ns"] = time.monotonic_ns(), 2 * NS_PER_MS
            rows["comm"], rows["seq"] = COMM, self.seq
            with path.open("ab") as file:
                file.write(rows.tobytes())
            return check()

        return wait_until(step)


@contextmanager
def running_agent(folder, port, report, pid):
    settings = {
        "rank": RANK,
        "n_ranks": 2,
        "pid": pid,
        "node_id": "n0",
        "cluster_id": "c",
        "push_interval_ns": NS_PER_S,
        "fleets": [f"127.0.0.1:{port}"],
        "folder": str(folder),
        "socket": str(folder / "remediate.sock"),
        "report": str(report),
        "files": [],
    }
    with launch("ingero.sim.cluster.agent", [json.dumps(settings)]) as agent:
        yield agent


def list_spilled(folder):
    """Sequence numbers on disk, in order; no agent may run."""
    spill = Spill(SpillSettings(folder / f"spill-{RANK}"), SystemClock())
    found = [
        seq
        for key in spill._folder.list_keys()
        for run in read_collectives(decode_protobuf(spill._folder.read(key)[13:], Signal.LOGS)).runs
        for seq in run.ops["seq"].tolist()
    ]
    spill.close()
    return found


def list_delivered(path):
    """Sequence numbers in the order in which Fleet passed them on."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    exports = [decode_export(line, Signal.LOGS, ContentType.JSON) for line in lines]
    runs = [run for export in exports for run in read_collectives(export).runs]
    return [seq for run in runs for seq in run.ops["seq"].tolist()]


def test_what_agents_kept_while_fleet_was_dead_arrives_in_order_and_once_although_one_was_killed(
    tmp_path,
):
    port, steps, passed_on = free_port(), Steps(), tmp_path / "passed-on.jsonl"
    spill = tmp_path / f"spill-{RANK}"

    def count():
        return len(list(spill.glob("[0-9]*")))

    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            with running_agent(tmp_path, port, tmp_path / "first", rank.pid) as agent:
                steps.take_until(tmp_path / "first", lambda: count() >= 3)
                agent.signal(signal.SIGKILL)
                agent.wait()
            kept = list_spilled(tmp_path)
            n_before = steps.seq
            assert kept == list(range(1, len(kept) + 1))
            with running_agent(tmp_path, port, tmp_path / "second", rank.pid):
                n_files = count()
                steps.take_until(tmp_path / "second", lambda: count() >= n_files + 2)
                config = build_fleet_config(nccl={})
                config["receivers"]["otlp"]["protocols"]["http"]["endpoint"] = f"127.0.0.1:{port}"
                config["exporters"]["file"] = {"path": str(passed_on), "flush_interval": "50ms"}
                config["service"]["pipelines"]["logs"]["exporters"] = ["file"]
                with run_fleet(config):
                    n_late = steps.seq
                    steps.take_until(
                        tmp_path / "second",
                        lambda: (
                            not count() and max(list_delivered(passed_on), default=0) > n_late + 50
                        ),
                    )
        finally:
            rank.kill()
    delivered = list_delivered(passed_on)
    assert delivered[: len(kept)] == kept
    assert delivered[len(kept) :] == list(range(n_before + 1, delivered[-1] + 1))
