"""Agents against a real ``ingero-fleet`` process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.agent.health.conftest import Rig

from ingero.testing.fleet import build_fleet_config, run_fleet

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
HEALTHY = [{"for": "100h"}]


def at(fleet):
    """A Fleet as the rig wants its collector: an address and nothing recorded."""
    return SimpleNamespace(url=f"http://{fleet.addresses['receivers.otlp http']}", requests=[])


def name_node(rig, name):
    identity = rig.loop._identity
    rig.loop._identity = type(identity)(
        cluster_id=identity.cluster_id, node_id=name, workload_type="training"
    )


@pytest.fixture
def make_agents():
    rigs = []

    def make(fleet, n_agents, steps=HEALTHY, **options):
        for number in range(n_agents):
            rig = Rig(at(fleet), steps, sample_s=10, **options)
            name_node(rig, f"n{len(rigs)}-{number}")
            rigs.append(rig)
        return rigs[-n_agents:]

    yield make
    for rig in rigs:
        rig.transport.close()


def test_fifty_equal_agents_are_judged_and_none_is_a_straggler(make_agents):
    with run_fleet(build_fleet_config()) as fleet:
        rigs = make_agents(fleet, 50)
        for _ in range(12):
            samples = [rig.sample() for rig in rigs]
            assert not any(sample.is_straggler for sample in samples)
        assert {sample.applied.mode.value for sample in samples} == {"fleet"}
        assert all(sample.applied.threshold < sample.score for sample in samples)


def test_the_slow_one_of_eight_is_named_and_no_other(make_agents):
    with run_fleet(build_fleet_config()) as fleet:
        healthy = make_agents(fleet, 7)
        (slow,) = make_agents(fleet, 1, [{"for": "100s"}, {"for": "100h", "throughput": 60}])
        for _ in range(20):
            samples = [rig.sample() for rig in [*healthy, slow]]
        assert [sample.is_straggler for sample in samples] == [False] * 7 + [True]
        assert samples[-1].dominant == "throughput"
        assert slow.episodes.n_opened == 1


def test_thresholds_are_back_within_two_push_intervals_of_a_restart(make_agents):
    with run_fleet(build_fleet_config()) as fleet:
        rigs = make_agents(fleet, 6)
        for _ in range(10):
            samples = [rig.sample() for rig in rigs]
        assert {sample.applied.mode.value for sample in samples} == {"fleet"}
    with run_fleet(build_fleet_config()) as fleet:
        for rig in rigs:
            endpoint = rig.transport.settings.endpoint
            object.__setattr__(endpoint, "base", at(fleet).url)
        for _ in range(3):
            for rig in rigs:
                rig.sample()
        ages = [rig.clock.mono_ns() - rig.cache.cached.mono_ns for rig in rigs]
        assert max(ages) == 0, "each has heard a threshold with its third push at the latest"


def test_eight_that_fall_together_one_after_the_other_are_no_stragglers(make_agents):
    with run_fleet(build_fleet_config()) as fleet:
        rigs = [
            make_agents(
                fleet,
                1,
                [{"for": f"{100 + number}s"}, {"for": "100s", "throughput": 30}, {"for": "100h"}],
                peers_wait_ns=10_000_000_000,
            )[0]
            for number in range(8)
        ]
        for rig in rigs:
            rig.loop._settings = replace(rig.loop._settings, sample_interval_ns=1_000_000_000)
        samples = []
        for _ in range(150):
            samples += [rig.sample() for rig in rigs]
        assert min(sample.score for sample in samples[-8:]) < 0.6
        assert not any(sample.is_straggler for sample in samples)
        assert {sample.applied.mode.value for sample in samples[-8:]} == {"none"}
        assert not any(rig.episodes.n_opened or rig.stream.seen for rig in rigs)


@pytest.mark.parametrize("protocol", ["http/json", "http/protobuf", "grpc"])
def test_every_protocol_brings_the_threshold_to_a_real_agent(protocol, tmp_path):
    with run_fleet(build_fleet_config({"quorum": {"statistical_min": 1}})) as fleet:
        door = "grpc" if protocol == "grpc" else "http"
        process = subprocess.Popen(
            [
                BIN / "ingero",
                "fleet-push",
                f"--fleet-endpoint={fleet.addresses[f'receivers.otlp {door}']}",
                "--fleet-insecure",
                "--fleet-cluster-id=c",
                f"--fleet-protocol={protocol}",
                "--fleet-push-interval=1s",
                "--fleet-timeout=1s",
                "--warmup-samples=1",
                "--stub",
                "--json",
                f"--fleet-persist-path={tmp_path / 'b.json'}",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            record = next(r for r in map(json.loads, process.stdout) if r["mode"] == "fleet")
        finally:
            process.kill()
            process.communicate()
    assert record["fleet"]["pushes_failed"] == 0
    assert 0.1 <= record["threshold"] < record["score"]
