"""Real agents and a real Fleet through 30 s of silence and clocks that jump an hour.

Nothing twice, every episode closed.

Processes, sockets and the network's silence are real and last as long as they say; a preloaded library steps the wall
clock of chosen processes. The ranks are simulated and report their own calls, so that no root is needed.
"""

import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.support import local_http
from tests.support.compiler import CC
from tests.support.relay import Network, Relay

from ingero.sim.cluster.simulated_agent import ReportReader
from ingero.sim.job import COLLECTIVE, WAIT, Job, JobSettings
from ingero.sim.launcher import start
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HTTP = "receivers.otlp http"
ADMIN = "extensions.ingero_threshold admin"
N_RANKS, STEPPED, PARTED = 4, 2, 3
PARTITION_S, HOUR_S = 30.0, 3600
EVEN_DAY = [{"for": "1h"}]
SLOW_DAY = [{"for": "6s"}, {"for": "20s", "throughput": 30}, *EVEN_DAY]
NODES = {f"even-{i}": EVEN_DAY for i in range(3)} | {"stepped": SLOW_DAY, "parted": SLOW_DAY}


class StepClock:
    """The wall clock of processes that were started with `environment`."""

    def __init__(self, library, path):
        self._path = path
        path.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(path)}

    def step(self, seconds):
        with self._path.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


def build_library(folder):
    library = folder / "clock-step.so"
    source = Path(__file__).with_name("clock_step.c")
    compiler = [*CC, "-shared", "-fPIC", "-O1"]
    subprocess.run([*compiler, "-o", library, source], check=True)
    return library


class Site:
    """A job of four ranks with their agents, and five nodes that play a day.

    One host has a network and one a clock of its own.
    """

    def __init__(self, folder, stack, monkeypatch):
        self.folder = folder
        library = build_library(folder)
        self.clock = StepClock(library, folder / "step-of-host")
        self.fleet_clock = StepClock(library, folder / "step-of-fleet")
        nccl = {"judge_interval": "100ms", "reorder_window": "200ms"}
        with monkeypatch.context() as patch:
            for name, value in self.fleet_clock.environment.items():
                patch.setenv(name, value)
            self.fleet = stack.enter_context(run_fleet(build_fleet_config(nccl=nccl)))
        self.relay = stack.enter_context(Relay(self.fleet.addresses[HTTP]))
        self.client = stack.enter_context(local_http.open_client(timeout=120))
        self.looks = {name: [] for name in NODES}
        self.job = stack.enter_context(Job(JobSettings(N_RANKS, folder, has_reports=True)))
        self.agents = [self._start_agent(rank, stack) for rank in range(N_RANKS)]
        for agent in self.agents:
            agent.wait_until_ready()
        for name in NODES:
            self._start_node(name, stack)
        self.job.release()

    def _start(self, command, stack, name, **more):
        address = self.relay.address if name == "parted" else self.fleet.addresses[HTTP]
        own = self.clock.environment if name == "stepped" else {}
        process = subprocess.Popen(
            [sys.executable, "-c", *command(f"http://{address}")],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            text=True,
            **more,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    def _start_agent(self, rank, stack):
        settings = {
            "cluster_id": "job",
            "n_ranks": N_RANKS,
            "fleets": [
                f"http://{self.relay.address if rank == PARTED else self.fleet.addresses[HTTP]}"
            ],
            "folder": str(self.folder),
            "push_interval_ns": NS_PER_S,
            "rank": rank,
            "pid": self.job.pids[rank],
            "node_id": f"n{rank}",
            "socket": str(self.folder / f"{rank}.sock"),
            "report": str(self.job.settings.report_path(rank)),
        }
        own = self.clock.environment if rank == STEPPED else {}
        agent = start("ingero.sim.cluster.agent", [json.dumps(settings)], environ=own)
        return stack.enter_context(agent)

    def _start_node(self, name, stack):
        script = self.folder / f"{name}.yaml"
        script.write_text(json.dumps({"steps": NODES[name]}))

        def command(fleet):
            return [
                "from ingero.cli.main import main; main()", "fleet-push", "--json",
                f"--fleet-endpoint={fleet}", "--fleet-cluster-id=nodes", f"--fleet-node-id={name}",
                "--fleet-push-interval=1s", "--fleet-timeout=1s", "--warmup-samples=3",
                f"--fleet-persist-path={self.folder / name}.json", f"--script={script}",
            ]  # fmt: skip

        process = self._start(command, stack, name)

        def follow():
            for line in process.stdout:
                self.looks[name].append(json.loads(line))

        threading.Thread(target=follow, daemon=True).start()

    def ask(self, page, cluster_id):
        answer = self.client.get(
            self.fleet.url(ADMIN, f"/api/v1/admin/{page}"), params={"cluster_id": cluster_id}
        )
        return {} if answer.status_code == httpx.codes.NOT_FOUND else answer.json()

    def episodes(self):
        """Outcome and the ids of its first and last event, by node; every episode that Fleet ever opened."""
        found = self.ask("episodes", "nodes").get("episodes", ())
        return sorted(
            (
                one["node_id"],
                one["outcome"],
                one["first"]["event_id"],
                one["last"]["event_id"],
            )
            for one in found
        )

    def judge(self):
        """Fleet's counts, and its verdicts by rank."""
        clusters = self.ask("verdicts", "job").get("clusters", ())
        if not clusters:
            return {}, {}
        return clusters[0]["counts"], {v["rank"]["rank"]: v for v in clusters[0]["verdicts"]}

    def n_counted(self):
        """Collectives that Fleet took, without repeats of what it had: an answer may be lost in the silence."""
        counts, _ = self.judge()
        return counts["ops"] - counts["stale_ops"]

    def named(self):
        """Whom Fleet says anything of that is not ordinary, but that all are slow in turns.

        That names nobody, and is true of ranks beside which other tests run.
        """
        verdicts = {(r, v["verdict"]) for r, v in self.judge()[1].items()}
        missing = self.ask("hang", "job").get("missing_ranks", ())
        ordinary = {"ordinary", "imbalance:data"}
        return {one for one in verdicts if one[1] not in ordinary} | {(r, "hang") for r in missing}

    def count(self):
        """Collectives that the ranks entered, and those that they left, from what they told themselves."""
        told = [ReportReader(self.job.settings.report_path(rank)).read() for rank in range(N_RANKS)]
        return tuple(
            sum(int((rows["what"] == what).sum()) for rows in told) for what in (COLLECTIVE, WAIT)
        )

    def end_in_a_collective(self):
        """End the job while all ranks but one wait for that one; how many collectives they entered."""
        self.job.pause(0)
        wait_until(lambda: np.subtract(*self.count()) >= N_RANKS - 1)
        self.job.close()
        return self.count()[0]


def test_half_a_minute_of_silence_and_hours_forth_and_back_cost_nothing(tmp_path, monkeypatch):
    with ExitStack() as stack:
        site = Site(tmp_path, stack, monkeypatch)
        wait_until(lambda: len(site.judge()[1]) == N_RANKS)
        wait_until(lambda: len(site.episodes()) == 2, 60)
        opened = site.episodes()
        site.relay.network = Network.PARTITION
        began_s, named, hours, compared = time.monotonic(), set(), [], []
        for part, step_s in enumerate((HOUR_S, -HOUR_S, 0), start=1):
            site.clock.step(step_s)
            site.fleet_clock.step(-step_s)
            while time.monotonic() < began_s + PARTITION_S * part / 3:
                named |= site.named()
                select.select([], [], [], 0.25)
            seen = datetime.fromisoformat(site.looks["stepped"][-1]["time"])
            hours.append(round((seen - datetime.now(UTC)).total_seconds() / HOUR_S))
            compared.append(site.judge()[1][PARTED]["n_ops"])
        assert hours == [1, -1, 0]
        assert len(set(compared)) == 1, "nothing can be compared without the silent host"
        assert not site.looks["parted"][-1]["fleet"]["reachable"]
        site.relay.network = Network.PASS
        closed = [(node, "resolved", first, last) for node, _, first, last in opened]
        wait_until(lambda: all(outcome for _, outcome, *_ in site.episodes()), 60)
        named |= site.named()
        assert site.episodes() == closed
        assert named == set()
        n_entered = site.end_in_a_collective()
        wait_until(lambda: site.n_counted() >= n_entered)
        assert site.n_counted() == n_entered
        n_silent_ops = PARTITION_S * NS_PER_S / site.job.settings.step_ns / 2
        # Fleet counts what arrives at once and compares it a judge's interval later.
        wait_until(
            lambda: all(v["n_ops"] > compared[0] + n_silent_ops for v in site.judge()[1].values())
        )
        counts, verdicts = site.judge()
        assert counts["dropped_ops"] == counts["incomplete_ops"] == counts["late_members"] == 0
        print(
            f"{n_entered} collectives entered, {counts['ops']} counted, {counts['stale_ops']} of them"
            f" repeats; compared {compared[0]} before and {verdicts[PARTED]['n_ops']} after"
        )
