"""The release before this one, from the history of this checkout, beside this one: agents, Fleets, files on disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.e2e.agents import Agents, event, told
from tests.echo.one_token import TOKEN, Echo
from tests.echo.service.conftest import collectives
from tests.fleet.test_file_storage_process import STORING
from tests.fleet.test_jetstream import (
    NODES,
    config_of,
    find_judge,
    is_judge,
    list_episodes,
    push,
    push_all,
)
from tests.fleet.test_process import Upstream, _push
from tests.support.collector import open_collector
from tests.support.ports import free_port

from ingero.errors import UnsupportedError
from ingero.fleet.jetstream.messages import (
    ClusterLedger,
    decode_ledger,
    encode_document,
    write_report,
)
from ingero.otlp.names import Signal
from ingero.sim.local_nats import LocalNats, find_nats_server
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.wire.verdicts import VerdictRecord, build_verdict_records

RELEASE = "ad59d31b8780dedf85b25ded9098fc4591c2c9ae"
"""0.1.0."""
STREAMS = "afa8e9e80e3c4f26e060bca3e0b4796c6ef032a1"
"""0.1.0 had no stream to meet in: until the next release, what was released last to those who follow this branch."""
NEW: dict[str, str] = {}
"""The environment in which this checkout's programs run."""
ECHO = (sys.executable, "-c", "from ingero.cli.programs.echo import main; main()")
"""Not by its console script: that is this checkout's, and names a module that the older one may not have."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The environment in which an older commit's programs run, by commit."""
    checkout = Path(__file__).parents[2]
    made = {}

    def build(commit):
        if commit not in made:
            folder = tmp_path_factory.mktemp("old")
            archive = folder / "src.tar"
            command = ["git", "-C", checkout, "archive", "-o", archive, commit, "src/ingero"]
            if shutil.which("git") is None or subprocess.run(command, check=False).returncode:
                pytest.skip(f"the older release is commit {commit} of a whole git checkout")
            subprocess.run(["tar", "-x", "-C", folder, "-f", archive], check=True)
            made[commit] = {"PYTHONPATH": str(folder / "src")}
        return made[commit]

    return build


def environ_of(added):
    return {**os.environ, **added}


def test_the_older_programs_are_what_runs(old):
    command = [sys.executable, "-c", "import ingero; print(ingero.__file__)"]
    for added in (old(RELEASE), old(STREAMS)):
        said = subprocess.run(command, env=environ_of(added), capture_output=True, check=True)
        assert said.stdout.decode().startswith(added["PYTHONPATH"])


@contextmanager
def running(config, environ):
    with run_fleet(config, environ=environ) as fleet:
        agents = Agents(fleet)
        with agents.client:
            yield agents


@contextmanager
def agent(fleet, node, environ, folder):
    """A ``fleet-push`` that makes up its own signals."""
    command = [
        *(sys.executable, "-m", "ingero", "fleet-push", "--stub", "--json"),
        *("--fleet-endpoint", fleet.push_url.rpartition("/v1/")[0], "--fleet-cluster-id", "c"),
        *("--fleet-node-id", node, "--fleet-push-interval", "1s", "--warmup-samples", "2"),
        *("--fleet-persist-path", str(folder / f"{node}.json")),
    ]
    with subprocess.Popen(
        command, env=environ_of(environ), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_given_the_threshold(process):
    return any(json.loads(line).get("mode") == "fleet" for line in process.stdout)


@pytest.mark.parametrize("is_fleet_old", [False, True])
def test_agents_of_both_releases_get_the_threshold_of_either_fleet(old, tmp_path, is_fleet_old):
    before = old(RELEASE)
    with ExitStack() as stack:
        fleet = stack.enter_context(running(build_fleet_config(), before if is_fleet_old else NEW))
        agents = [
            stack.enter_context(agent(fleet, f"n{at}", environ, tmp_path))
            for at, environ in enumerate((before, NEW, before, NEW, before))
        ]
        assert all(map(is_given_the_threshold, agents))
        assert fleet.admin("nodes", cluster_id="c")["total"] == len(agents)


@pytest.mark.parametrize("is_judge_old", [True, False])
def test_a_killed_judge_is_replaced_by_one_of_the_other_release_and_no_report_comes_twice(
    old, tmp_path, is_judge_old
):
    try:
        find_nats_server()
    except UnsupportedError as error:
        pytest.skip(str(error))
    first, second = (old(STREAMS), NEW) if is_judge_old else (NEW, old(STREAMS))
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        collector = stack.enter_context(open_collector())
        config = config_of(nats, collector)
        killed = stack.enter_context(running(config, first))
        push_all(killed, "two")
        find_judge([killed], "two")
        heir = stack.enter_context(running(config, second))
        push(heir, event("n3", 1, cluster="two"))
        push_all(heir, "two", [node for node in NODES if node != "n3"])
        ((incident, state),) = wait_until(lambda: list_episodes(collector))
        assert state == "open"
        wait_until(lambda: told(push_all(heir, "two")[0]) == (0.89, "true"))

        killed.fleet.signal(signal.SIGKILL)
        wait_until(lambda: is_judge(heir, "two"))
        assert told(push_all(heir, "two")[0]) == (0.89, "true")
        push(heir, event("n3", 0, cluster="two"))
        wait_until(lambda: len(list_episodes(collector)) > 1)
        assert list_episodes(collector) == [(incident, "open"), (incident, "resolved")]


READ_LEDGER = """
import sys
from ingero.fleet.jetstream.messages import decode_ledger, encode_document
ledger = decode_ledger(sys.stdin.buffer.read())
assert ledger.restore() == {"rank 4": "drag"}, ledger
sys.stdout.buffer.write(encode_document(ledger))
"""


def test_an_older_fleet_goes_on_from_what_was_said_before_records_that_it_does_not_know(old):
    export = build_verdict_records("c", [VerdictRecord(kind="culprit", rank=3)], 7)
    written = write_report("nccl", ["rank 3"], export)
    said = {"rank 3": "culprit", "rank 4": "drag"}
    ledger = ClusterLedger(said, {"rank 3": None}, 5, written=[written])
    command = [sys.executable, "-c", READ_LEDGER]
    environ = environ_of(old(STREAMS))
    stored = encode_document(ledger)
    again = subprocess.run(command, input=stored, env=environ, stdout=subprocess.PIPE, check=True)
    back = decode_ledger(again.stdout)
    assert (back.restore(), back.written) == ({"rank 4": "drag"}, [])


@pytest.mark.parametrize("is_first_old", [True, False])
def test_a_queue_on_disk_is_delivered_by_a_fleet_of_the_other_release(old, tmp_path, is_first_old):
    first, second = (old(STREAMS), NEW) if is_first_old else (NEW, old(STREAMS))
    config, port = tmp_path / "fleet.yaml", free_port()
    config.write_text(STORING)
    places = {"UPSTREAM": f"http://127.0.0.1:{port}", "STORAGE": str(tmp_path / "storage")}
    with run_fleet(config, environ={**places, **first}) as fleet:
        taken = [float(n) for n in range(20) if _push(fleet, float(n)).status_code == 200]
        fleet.signal(signal.SIGKILL)
        fleet.wait()
    assert len(taken) == 20
    upstream = Upstream(port)
    try:
        with run_fleet(config, environ={**places, **second}) as fleet:
            upstream.wait_for(20)
    finally:
        upstream.close()
    assert upstream.values == taken


def test_a_database_of_the_older_echo_is_opened_by_this_one_with_all_its_rows(
    old, tmp_path, monkeypatch
):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    counts = []
    for cluster, added in (("c1", old(RELEASE)), ("c2", NEW)):
        with monkeypatch.context() as patched:
            for name, value in added.items():
                patched.setenv(name, value)
            echo = Echo(tmp_path / "echo.db", token_file, program=ECHO)
        pushed = echo.push(collectives(cluster, time.time_ns()), Signal.LOGS)
        assert pushed.status_code == 200
        (rows,) = echo.sql("SELECT count(*) FROM collectives")
        counts += rows
        assert echo.end() == 0
    assert counts == [160, 320]
