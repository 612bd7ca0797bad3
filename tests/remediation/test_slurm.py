"""Debian's own Slurm: what is drained, given back, requeued and left alone there."""

import subprocess
import sys
from dataclasses import replace

import pytest
from tests.remediation.live import launch_remediator, run_job, write_policy

from ingero.agent.capture.discover.identity import read_identity
from ingero.errors import PermanentError, RetryableError, UnsupportedError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.slurm import SlurmActuator, parse_nodes
from ingero.remediation.config import SlurmConfig
from ingero.remediation.journal import Journal
from ingero.remediation.records import ActionRecord, ActionState, Moment
from ingero.remediation.slurm_states import is_in_service
from ingero.sim.cluster.slurm import build_local_nodes, run_slurm
from ingero.testing.waiting import wait_until

slurm_tier = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
RECORD = ActionRecord(
    action_id="a0123456789", episode="e0123456789", cluster_id="c", node_id="node5.site", target="h1", kind="slurm",
    state=ActionState.BEGUN, began=Moment(0, 0, "b"), changed=Moment(0, 0, "b"),
    evidence={"verdict": "culprit", "rank": 5, "reason": "own time 1.4× \n that of its peers"},
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with run_slurm(tmp_path_factory.mktemp("s"), build_local_nodes()) as running:
        yield running


@pytest.fixture
def actuator(slurm, monkeypatch):
    """On a cluster whose nodes are all idle."""
    slurm.run("scancel", "-u", "root")
    for node in slurm.nodes:
        if slurm.states()[node].startswith(("drain", "drng", "down")):
            slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
    wait_until(lambda: set(slurm.states().values()) == {"idle"})
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    return SlurmActuator(SlurmConfig(requeue=True))


class TestRealSlurm:
    pytestmark = slurm_tier

    def test_a_drain_shows_the_action_and_its_finding_and_takes_no_new_job_until_undone(
        self, slurm, actuator
    ):
        assert all(view.in_service for view in actuator.read_nodes().values())
        actuator.apply(RECORD)
        actuator.apply(RECORD)
        view = actuator.read_nodes()["h1"]
        assert (view.in_service, view.mark, view.state) == (False, "a0123456789", "IDLE+DRAIN")
        assert (
            view.reason
            == "ingero a0123456789 e0123456789: culprit rank 5: own time 1.4x   that of its peers"
        )
        assert slurm.states() == {"h1": "drain", "h2": "idle", "h3": "idle", "h4": "idle"}
        actuator.reverse(RECORD)
        actuator.reverse(RECORD)
        view = actuator.read_nodes()["h1"]
        assert (view.in_service, view.mark) == (True, "")

    def test_a_node_that_a_person_took_out_meanwhile_stays_out_with_that_persons_reason(
        self, slurm, actuator
    ):
        """Between the look at all nodes and the request many seconds may pass."""
        assert actuator.read_nodes()["h1"].in_service
        slurm.run("scontrol", "update", "nodename=h1", "state=drain", "reason=bad memory")
        with pytest.raises(PermanentError, match=r"out of service already: IDLE.DRAIN"):
            actuator.apply(RECORD)
        actuator.reverse(RECORD)
        view = actuator.read_nodes()["h1"]
        assert (view.in_service, view.mark, view.reason) == (False, "", "bad memory")

    def test_a_reason_of_somebody_else_is_no_mark_and_a_down_node_is_not_in_service(
        self, slurm, actuator
    ):
        slurm.run(
            "scontrol", "update", "nodename=h3", "state=down", "reason=ingero was wrong [x@y]"
        )
        view = actuator.read_nodes()["h3"]
        assert (view.in_service, view.mark) == (False, "")
        slurm.run("scontrol", "update", "nodename=h3", "state=resume")
        wait_until(lambda: actuator.read_nodes()["h3"].in_service)

    def test_a_node_in_a_maintenance_reservation_is_not_in_service_until_it_ends(
        self, slurm, actuator
    ):
        slurm.run(
            "scontrol", "create", "reservation", "reservationname=work", "starttime=now",
            "duration=60", "user=root", "flags=maint,ignore_jobs", "nodes=h2",
        )  # fmt: skip
        try:
            wait_until(lambda: "MAINTENANCE" in actuator.read_nodes()["h2"].state)
            views = actuator.read_nodes()
            assert (views["h2"].state, views["h2"].in_service) == (
                "IDLE+MAINTENANCE+RESERVED",
                False,
            )
            assert views["h1"].in_service
            with pytest.raises(PermanentError, match="out of service already"):
                actuator.apply(replace(RECORD, target="h2"))
        finally:
            slurm.run("scontrol", "delete", "reservationname=work")
        wait_until(lambda: actuator.read_nodes()["h2"].in_service)

    def test_a_job_that_may_be_requeued_is_and_its_restarts_are_counted(self, slurm, actuator):
        job = slurm.run(
            "sbatch", "--parsable", "--requeue", "-w", "h1", "--wrap", "sleep 600"
        ).strip()
        slurm.run("sbatch", "--parsable", "--no-requeue", "-w", "h2", "--wrap", "sleep 600")
        wait_until(lambda: actuator.find_jobs(RECORD) == {job: 0})
        wait_until(lambda: slurm.run("squeue", "-h", "-t", "R", "-w", "h2").strip())
        assert actuator.find_jobs(replace(RECORD, target="h2")) == {}
        actuator.requeue(job)
        wait_until(lambda: actuator.find_jobs(RECORD) == {})
        assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)

    def test_an_allocation_without_a_batch_script_is_left_alone_and_refused(self, slurm, actuator):
        slurm.run("salloc", "--no-shell", "-w", "h2")
        (job,) = slurm.run("squeue", "-h", "-t", "R", "-w", "h2", "-o", "%A").split()
        assert "Requeue=1" in slurm.run("scontrol", "show", "job", job)
        assert actuator.find_jobs(replace(RECORD, target="h2")) == {}
        with pytest.raises(PermanentError, match="Only batch jobs"):
            actuator.requeue(job)

    def test_a_process_of_a_job_is_known_by_its_job_step_and_node(self, slurm, actuator):
        said = slurm.folder / "pid"
        script = f"echo $$ > {said}.part; mv {said}.part {said}; exec sleep 600"
        job = slurm.run(
            "sbatch", "--parsable", "-w", "h3", "--wrap", f"srun sh -c '{script}'"
        ).strip()
        wait_until(said.exists)
        identity = read_identity(int(said.read_text()))
        assert dict(identity.resource) == {
            "slurm.job.id": job, "slurm.step.id": "0", "slurm.node.name": "h3",
        }  # fmt: skip
        assert (identity.job, identity.launcher, identity.place.rank) == (job, "slurm", 0)

    def test_what_slurm_refuses_is_permanent_and_a_missing_slurm_is_said(self, actuator):
        with pytest.raises(PermanentError, match="Node h9 not found"):
            actuator.apply(replace(RECORD, target="h9"))
        with pytest.raises(PermanentError, match="Invalid job id"):
            actuator.requeue("999")
        with pytest.raises(UnsupportedError, match="no /nowhere/scontrol"):
            SlurmActuator(SlurmConfig(bin_dir="/nowhere")).read_nodes()

    def test_a_controller_that_does_not_answer_may_answer_later(self, tmp_path, monkeypatch):
        conf = tmp_path / "slurm.conf"
        conf.write_text("ClusterName=x\nSlurmctldHost=x(127.0.0.1)\nSlurmctldPort=9\nNodeName=x\n")
        monkeypatch.setenv("SLURM_CONF", str(conf))
        with pytest.raises(RetryableError):
            SlurmActuator(SlurmConfig(timeout="1s")).read_nodes()

    def test_a_node_is_found_by_the_policys_table_its_name_or_the_first_label_of_it(self, actuator):
        nodes = actuator.read_nodes()
        named = SlurmActuator(SlurmConfig(node_names={"gpu-17": "h4", "gpu-18": "gone"}))
        assert actuator.find_target(Rank("c", "h2", 0), nodes) == "h2"
        assert actuator.find_target(Rank("c", "h2.cluster.site", 0), nodes) == "h2"
        assert [
            named.find_target(Rank("c", node, 0), nodes) for node in ("gpu-17", "gpu-18", "gpu-19")
        ] == [
            "h4",
            "",
            "",
        ]
        host = subprocess.run(
            ["hostname", "-s"], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert actuator.find_target(Rank("c", host, 0), nodes) == ""  # all four are on this host

    @pytest.mark.slow
    def test_a_verdict_of_a_real_fleet_drains_the_node_requeues_its_job_and_is_undone_by_hand(
        self, slurm, actuator, tmp_path
    ):
        job = slurm.run(
            "sbatch", "--parsable", "--requeue", "-w", "h2", "--wrap", "sleep 600"
        ).strip()
        wait_until(lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING")
        with run_job() as (agents, pushes):
            file = write_policy(tmp_path, agents)
            with launch_remediator(file, slurm):

                def is_drained():
                    pushes.push()
                    return slurm.states()["h2"] == "drain"

                wait_until(is_drained)
                (action,) = wait_until(lambda: find_actions(file, "done"))
                assert slurm.states() == {"h1": "idle", "h2": "drain", "h3": "idle", "h4": "idle"}
                reason = slurm.run("sinfo", "-h", "-n", "h2", "-o", "%E")
                assert reason.startswith(
                    f"ingero {action.action_id} {action.episode}: culprit rank 5"
                )
                assert (action.evidence["node_id"], action.jobs) == ("node5", {job: 0})
                assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
                assert ask(file, "exclude") == "--exclude=h2\n"
                assert "one action per episode" in ask(file, "explain", action.action_id)
                assert "undoing" in ask(file, "undo", action.action_id)
                wait_until(lambda: find_actions(file, "undone"))
                wait_until(lambda: slurm.states()["h2"] in {"idle", "mix", "alloc"})


def ask(file, *arguments):
    program = "from ingero.cli.programs.remediator import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments, "--config", str(file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def find_actions(file, state):
    path = file.parent / "journal.db"
    if not path.exists():
        return []
    with Journal(path, read_only=True) as journal:
        return [one for one in journal.actions() if one.state == state]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE", True), ("MIXED+CLOUD", True), ("ALLOCATED*", True), ("IDLE+NOT_RESPONDING", True),
        ("IDLE+DRAIN", False), ("MIXED+DRAIN", False), ("DOWN", False), ("DOWN+DRAIN", False),
        ("IDLE+MAINTENANCE+RESERVED", False), ("MIXED+MAINTENANCE+RESERVED", False), ("MAINT", False), ("MIXED$", False),
        ("ALLOCATED+RESERVED", True), ("IDLE+PLANNED", True), ("IDLE-", True), ("ALLOCATED+PERFCTRS", True), ("IDLE#", True),
        ("MIXED+REBOOT_REQUESTED", False), ("IDLE+REBOOT_ISSUED", False), ("MIXED@", False), ("IDLE^", False),
        ("IDLE+POWER_DOWN", False), ("IDLE+POWERING_DOWN", False), ("IDLE!", False), ("IDLE%", False), ("IDLE~", False),
        ("UNKNOWN", False), ("IDLE+CLOUD+POWERED_DOWN", False), ("FUTURE", False), ("IDLE+FAIL", False), ("IDLE+INVALID_REG", False),
    ],
)  # fmt: skip
def test_a_node_is_in_service_in_these_states(state, expected):
    assert is_in_service(state) is expected


def test_a_reason_that_outlived_its_drain_is_no_mark():
    line = "NodeName=h1 NodeHostName=x State=DOWN Reason=ingero a0123456789 e1: x [root@2026-01-01T00:00:00]"
    assert parse_nodes(line)["h1"][0].mark == ""
    assert parse_nodes(line.replace("DOWN", "IDLE+DRAIN"))["h1"][0].mark == "a0123456789"


def test_a_host_that_slurm_calls_otherwise_is_found_by_both_names(tmp_path):
    """So the remediator sees that they are one, whichever of them the culprit is."""
    lines = "\\n".join(f"NodeName=n{one} NodeHostName=gpu{16 + one} State=IDLE" for one in (1, 2))
    write_program(tmp_path, "scontrol", f"printf '{lines}\\n'")
    actuator = SlurmActuator(SlurmConfig(bin_dir=str(tmp_path)))
    views = actuator.read_nodes()
    names = ("n1", "gpu17", "gpu17.site", "gpu18", "gpu19")
    assert [actuator.find_target(Rank("c", name, 0), views) for name in names] == [
        "n1", "n1", "n1", "n2", "",
    ]  # fmt: skip


def write_program(folder, name, text):
    """A program of Slurm's that a test plays."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_of_what_runs_on_a_node_batch_jobs_that_may_be_requeued_are(tmp_path):
    rows = "7|0|1|1|\n8|0|1|0|\n9_2|1|1|1|\n10|0|0|1|"
    write_program(tmp_path, "squeue", f"cat <<'END'\n{rows}\nEND")
    actuator = SlurmActuator(SlurmConfig(requeue=True, bin_dir=str(tmp_path)))
    assert actuator.find_jobs(RECORD) == {"7": 0, "9_2": 1}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("Only batch jobs are accepted or processed for job 8", PermanentError),
        ("Requested operation is presently disabled for job 10", PermanentError),
        ("Job can not be altered now, try again later for job 7", RetryableError),
        ("Slurm backup controller in standby mode for job 7", RetryableError),
    ],
)
def test_what_slurm_will_never_requeue_is_a_refusal(tmp_path, line, error):
    write_program(tmp_path, "scontrol", f"echo {line!r} >&2\nexit 1")
    with pytest.raises(error, match=line):
        SlurmActuator(SlurmConfig(bin_dir=str(tmp_path))).requeue("7")
