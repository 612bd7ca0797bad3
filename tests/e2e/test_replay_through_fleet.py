"""The main job: a real trace, real pushes, a real Fleet, one named culprit."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support import local_http
from tests.support.packaged_trace import read_first_steps, write_first_steps
from tests.support.relay import Network, Relay

from ingero.cli.commands.replay.command import COMPRESSED
from ingero.errors import UnsupportedError
from ingero.sim.local_fleet import ADMIN, OTLP_HTTP, run_local_fleet
from ingero.sim.local_nats import LocalNats, find_nats_server
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow
INGERO = [sys.executable, "-m", "ingero"]


def replay(*args, trace="AR"):
    run = subprocess.run(
        [*INGERO, "replay", str(trace), "--json", *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def offline():
    return replay("--offline")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A third of AR, for what does not depend on its length: each push of it costs a Fleet time."""
    return write_first_steps(tmp_path_factory.mktemp("short") / "trace-short.parquet", 15)


@pytest.fixture(scope="module")
def short_offline(short):
    return replay("--offline", trace=short)


def test_through_the_network_the_answer_is_exactly_the_offline_one(offline):
    assert replay("--speed", "400") == offline


@pytest.fixture
def nats(tmp_path):
    """A real server."""
    try:
        find_nats_server()
    except UnsupportedError as error:
        pytest.skip(str(error))
    server = LocalNats(tmp_path)
    with server.run():
        yield server


@pytest.fixture
def recovered(tmp_path):
    """Half of AR, of which the slow worker is well again after twelve steps."""
    columns = read_first_steps(24)
    is_slow = (columns["dp_rank"] == 0) & (columns["stage"] == 0)
    is_well = columns["step"] >= np.unique(columns["step"])[12]
    for kind in ("forward-compute", "backward-compute"):
        is_kind = columns["optype"] == kind
        usual = np.median(columns["duration"][is_kind & ~is_slow & (columns["stage"] == 0)])
        slow = np.median(columns["duration"][is_kind & is_slow])
        columns["duration"][is_kind & is_slow & is_well] *= usual / slow
    path = tmp_path / "trace-recovered.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_a_culprit_that_recovered_is_named_by_both_paths(recovered):
    offline = replay("--offline", trace=recovered)
    assert offline["culprits"] == [{"dp_rank": 0, "stage": 0}]
    assert "recovered" in offline["verdicts"][0]["reason"]
    assert replay("--speed", "400", "--interval", "30s", trace=recovered) == offline


def test_only_the_injected_worker_is_a_culprit_and_within_a_step(offline):
    alarmed = [v for v in offline["verdicts"] if v["verdict"] in {"culprit", "network", "drag"}]
    (culprit,) = alarmed
    assert culprit["worker"] == {"dp_rank": 0, "stage": 0}
    assert culprit["detected_step"] == culprit["onset_step"] == 16
    assert culprit["slowdown"] == pytest.approx(2.38, abs=0.02)
    assert len(culprit["victims"]) == 15


def test_several_receiving_processes_give_exactly_the_same_answer(short, short_offline):
    with run_local_fleet((*COMPRESSED, "service.workers=2")) as fleet:
        result = replay(
            "--speed", "1000", "--interval", "20s",
            "--fleet", fleet.url(OTLP_HTTP),
            "--admin", fleet.url(ADMIN),
            trace=short,
        )  # fmt: skip
    assert result == short_offline


def test_over_a_stream_the_answer_is_the_same_and_a_judge_that_takes_over_keeps_it(
    short, short_offline, nats
):
    shared = (*COMPRESSED, f"service.storage.nats.servers=[{nats.url}]")
    receiving = (*shared, "service.storage.nats.judge=false")
    with ExitStack() as stack:
        judge = stack.enter_context(run_local_fleet(shared))
        receiver = stack.enter_context(run_local_fleet(receiving))
        result = replay(
            "--speed", "1000", "--interval", "60s", "--cluster-id", "fallen",
            "--fleet", receiver.url(OTLP_HTTP),
            "--admin", judge.url(ADMIN),
            trace=short,
        )  # fmt: skip
        assert result == short_offline
        before = ask_verdicts(judge, "fallen")
        judge.signal(signal.SIGKILL)
        heir = stack.enter_context(run_local_fleet(shared))
        after = wait_until(lambda: ask_verdicts(heir, "fallen"))
    assert len(before) == 16
    assert after == before


def ask_verdicts(fleet, cluster):
    """Every verdict on a cluster as it leaves Fleet; none before Fleet knows the cluster."""
    page = local_http.get(
        fleet.url(ADMIN, "/api/v1/admin/verdicts"), params={"cluster_id": cluster}, timeout=120
    )
    return page.json()["clusters"][0]["verdicts"] if page.is_success else []


def test_replay_into_a_running_fleet_leaves_it_running(short):
    with run_local_fleet() as fleet:
        result = replay(
            "--speed", "1000", "--interval", "60s",
            "--fleet", fleet.url(OTLP_HTTP),
            "--admin", fleet.url(ADMIN),
            "--cluster-id", "prod a",
            trace=short,
        )  # fmt: skip
        assert result["culprits"] == [{"dp_rank": 0, "stage": 0}]
        again = replay("--speed", "1000", "--interval", "60s", "--fleet", fleet.url(OTLP_HTTP),
                       "--admin", fleet.url(ADMIN), trace=short)  # fmt: skip
        assert again["culprits"] == result["culprits"]


def test_pushes_that_came_twice_are_not_taken_for_the_rest_of_the_recording(offline):
    is_over = threading.Event()
    with (
        run_local_fleet(COMPRESSED) as fleet,
        Relay(fleet.address(OTLP_HTTP)) as relay,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(lose_answers, relay, is_over)
        try:
            result = replay(
                "--speed", "200", "--interval", "40s",
                "--fleet", f"http://{relay.address}",
                "--admin", fleet.url(ADMIN),
            )  # fmt: skip
        finally:
            is_over.set()
    # How many of the six lost answers were answers to a push depends on how fast this machine is.
    ops_of_a_push = offline["ops"] * 40 / offline["duration_s"]
    assert result.pop("counts")["stale_ops"] > ops_of_a_push
    assert result == {name: part for name, part in offline.items() if name != "counts"}


def lose_answers(relay, is_over):
    """Six times: what is sent arrives, what is answered is lost with its connection."""
    for _ in range(6):
        n_before = relay.n_bytes
        while relay.n_bytes == n_before:
            if is_over.wait(0.01):
                return
        relay.network = Network.NO_ANSWERS
        is_over.wait(0.5)
        relay.network = Network.PASS
        relay.cut()
        is_over.wait(0.8)


def test_interrupt_ends_the_replay_and_its_fleet():
    run = subprocess.Popen(
        [*INGERO, "replay", "AR", "--speed", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stderr is not None
    assert "Fleet of our own" in run.stderr.readline()
    children = psutil.Process(run.pid).children(recursive=True)
    assert children
    os.kill(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=90)
    assert run.returncode == 130, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive


def test_fleet_that_is_not_there_is_named_with_the_next_step():
    run = subprocess.run(
        [*INGERO, "replay", "AR", "--fleet", "http://127.0.0.1:9", "--speed", "10000"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "did not take a push" in run.stderr
    assert "hint:" in run.stderr
