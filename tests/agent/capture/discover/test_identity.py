"""Ranks, jobs and containers out of what launchers and runtimes really write. No root."""

import os
import subprocess
import sys

import pytest

from ingero.agent.capture.discover.cgroups import Cgroups, parse_memberships
from ingero.agent.capture.discover.identity import (
    SlurmStep,
    find_meeting,
    find_place,
    parse_cgroup,
    parse_environment,
    parse_stat,
    read_identity,
)
from ingero.model.recording import ProcessRank

CONTAINER = "9d1b0a7c" * 8
POD = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"


def test_each_launcher_s_variables_give_the_place():
    assert find_place({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == (
        "torchrun",
        ProcessRank(3, 1, 8),
    )
    assert find_place({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}) == (
        "slurm",
        ProcessRank(0, 0, 4),
    )
    openmpi = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "2"), ("LOCAL_RANK", "0"), ("SIZE", "3"))
    }
    assert find_place(openmpi) == ("openmpi", ProcessRank(2, 0, 3))
    assert find_place({"PMI_RANK": "5", "PMI_SIZE": "6"}) == ("pmi", ProcessRank(5, -1, 6))


def test_torchrun_inside_a_slurm_step_is_torchrun():
    both = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "7", "WORLD_SIZE": "8"}
    assert find_place(both) == ("torchrun", ProcessRank(7, -1, 8))


def test_a_rank_that_is_no_number_is_no_rank():
    assert find_place({"RANK": "lead", "WORLD_SIZE": "8"}) == ("", ProcessRank())
    assert find_place({}) == ("", ProcessRank())


def test_the_first_of_a_repeated_variable_counts_as_for_getenv():
    assert parse_environment(b"A=1\0B=x=y\0A=2\0broken\0") == {"A": "1", "B": "x=y"}


def test_a_kubernetes_pod_and_its_container_on_cgroup_v2():
    path = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope"
    assert parse_cgroup(parse_memberships(f"0::{path}\n")) == (path, CONTAINER, POD, SlurmStep())


def test_docker_on_cgroup_v1_takes_the_longest_path():
    text = f"12:cpu:/docker/{CONTAINER}\n3:pids:/\n0::/\n"
    assert parse_cgroup(parse_memberships(text)) == (
        f"/docker/{CONTAINER}",
        CONTAINER,
        "",
        SlurmStep(),
    )


def test_a_slurm_step_is_read_from_its_cgroup():
    path, container, pod, slurm = parse_cgroup(
        parse_memberships("0::/system.slice/slurmstepd.scope/job_4711/step_0/user\n")
    )
    assert (container, pod, slurm) == ("", "", SlurmStep("4711", "0"))
    assert path.endswith("/user")
    *_, slurm = parse_cgroup(parse_memberships("5:memory:/slurm/uid_0/job_12/step_batch/task_0\n"))
    assert slurm == SlurmStep("12", "batch")


def test_a_command_name_may_hold_brackets_and_spaces():
    fields = " ".join(["S", *map(str, range(4, 22)), "987654", "0"])
    assert parse_stat(f"42 (a) b (c) {fields}\n") == ("a) b (c", 987654)


def test_this_process_is_known_and_a_missing_one_is_not(tmp_path):
    identity = read_identity(os.getpid())
    assert identity.pid == os.getpid()
    assert identity.start_ticks > 0
    assert read_identity(1, proc=tmp_path) is None


def test_a_process_that_calls_exec_again_and_again_keeps_its_rank(tmp_path):
    script = tmp_path / "again.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "left = int(sys.argv[1])\n"
        "if left:\n"
        "    os.execv(sys.executable, [sys.executable, '-IS', sys.argv[0], str(left - 1)])\n"
        "pathlib.Path(sys.argv[0] + '.done').touch()\n"
        "signal.pause()\n"
    )
    done = tmp_path / "again.py.done"
    command = [sys.executable, "-IS", str(script), "30"]
    ranks = set()
    with subprocess.Popen(command, env={"RANK": "3"}) as child:
        while not done.exists():
            ranks.add(read_identity(child.pid).place.rank)
        child.kill()
    assert ranks == {3}


def pod_process(tmp_path, environment, namespace=""):
    """A process of a pod, in a ``/proc`` of ours."""
    folder = tmp_path / "42"
    secrets = folder / "root/var/run/secrets/kubernetes.io/serviceaccount"
    secrets.mkdir(parents=True)
    if namespace:
        (secrets / "namespace").write_text(f"{namespace}\n")
    fields = " ".join(["S", *map(str, range(4, 22)), "987654", "0"])
    (folder / "stat").write_text(f"42 (train) {fields}\n")
    (folder / "environ").write_bytes(
        b"\0".join(f"{k}={v}".encode() for k, v in environment.items())
    )
    (folder / "cgroup").write_text(f"0::/kubepods/burstable/pod{POD}/{CONTAINER}\n")
    return read_identity(42, proc=tmp_path)


def test_torchruns_word_for_no_job_is_none(tmp_path):
    assert pod_process(tmp_path, {"TORCHELASTIC_RUN_ID": "none"}).job == ""


def test_a_job_is_what_its_launcher_calls_it(tmp_path):
    told = {"TORCHELASTIC_RUN_ID": "none", "JOB_ID": "nightly"}
    assert pod_process(tmp_path, told).job == "nightly"


def test_a_pod_is_named_by_the_downward_api_before_its_host_name(tmp_path):
    told = {"HOSTNAME": "other", "POD_NAME": "train-0", "POD_NAMESPACE": "ml"}
    identity = pod_process(tmp_path, told, namespace="default")
    assert (identity.pod.name, identity.pod.namespace) == ("train-0", "ml")
    assert (identity.pod.uid, identity.container) == (POD, CONTAINER)


def test_a_pod_that_was_told_nothing_has_its_host_name_and_its_account_s_namespace(tmp_path):
    identity = pod_process(tmp_path, {"HOSTNAME": "train-1"}, namespace="research")
    assert (identity.pod.name, identity.pod.namespace) == ("train-1", "research")


def lay_namespace(tmp_path, *, lay):
    """The namespace of a pod whose service account's file is made by ``lay``."""
    pod_process(tmp_path, {}, namespace="research")
    secrets = tmp_path / "42/root/var/run/secrets/kubernetes.io/serviceaccount"
    (secrets / "namespace").unlink()
    lay(secrets / "namespace")
    return read_identity(42, proc=tmp_path, n_reads=1).pod.namespace


def test_a_pod_that_links_its_namespace_to_a_file_of_the_host_has_none(tmp_path):
    (tmp_path / "secret").write_text("of the host")
    assert lay_namespace(tmp_path, lay=lambda one: one.symlink_to(tmp_path / "secret")) == ""


@pytest.mark.timeout(20)
def test_a_pod_with_a_pipe_for_its_namespace_is_not_waited_for(tmp_path):
    assert lay_namespace(tmp_path, lay=os.mkfifo) == ""


def test_a_namespace_is_found_where_the_image_links_its_folder(tmp_path):
    pod_process(tmp_path, {}, namespace="research")
    root = tmp_path / "42/root"
    (root / "var/run").rename(root / "run")
    (root / "var/run").symlink_to("/run")
    assert read_identity(42, proc=tmp_path, n_reads=1).pod.namespace == "research"


def process(tmp_path, environment, cgroup):
    folder = pod_process(tmp_path, environment) and tmp_path / "42"
    (folder / "cgroup").write_text(cgroup)
    return read_identity(42, proc=tmp_path)


def test_where_a_pod_s_process_runs_is_told_in_opentelemetry_s_words(tmp_path):
    told = {"POD_NAME": "train-0", "POD_NAMESPACE": "ml", "SLURM_STEP_ID": "of no job"}
    assert dict(pod_process(tmp_path, told).resource) == {
        "container.id": CONTAINER,
        "k8s.namespace.name": "ml",
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": POD,
    }


@pytest.mark.parametrize(
    ("cgroup", "told"),
    [
        ("0::/user.slice\n", ("7", "2", "gpu-a")),
        ("0::/system.slice/slurmstepd.scope/job_7/step_extern/user\n", ("7", "extern", "gpu-a")),
        # An environment that was inherited from another job, as from the shell of an allocation.
        ("0::/system.slice/slurmstepd.scope/job_9/user\n", ("9", None, "gpu-a")),
    ],
)
def test_a_slurm_step_is_the_cgroup_s_before_the_environment_s(tmp_path, cgroup, told):
    names = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURMD_NODENAME": "gpu-a"}
    resource = dict(process(tmp_path, names, cgroup).resource)
    keys = ("slurm.job.id", "slurm.step.id", "slurm.node.name")
    assert tuple(resource.get(key) for key in keys) == told


def test_outside_a_pod_a_host_name_is_no_pod_s_name():
    assert read_identity(os.getpid()).pod.name == ""


@pytest.mark.parametrize(
    ("mounts", "place"),
    [
        (("sys/fs/cgroup cgroup2 rw,nosuid",), "sys/fs/cgroup"),
        (("m cgroup rw,memory", "sys/fs/cgroup/unified cgroup2 rw"), "sys/fs/cgroup/unified"),
        (("sys/fs/cgroup/memory cgroup rw,memory", ""), None),
    ],
    ids=["version 2 alone", "beside version 1", "version 1 alone"],
)
def test_version_2_of_cgroups_is_found_where_it_is_mounted(tmp_path, mounts, place):
    (tmp_path / "self").mkdir()
    lines = []
    for mount in filter(None, mounts):
        folder, kind, options = mount.split()
        (tmp_path / folder).mkdir(parents=True)
        lines.append(f"31 23 0:28 / {tmp_path / folder} rw - {kind} none {options}\n")
    (tmp_path / "self/mountinfo").write_text("".join(lines) + "\n")
    assert Cgroups(tmp_path).find_root() == (tmp_path / place if place else None)


def test_ranks_of_a_requeued_job_meet_for_another_time():
    job = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    assert find_meeting(job) == "10.0.0.7:29500"
    assert find_meeting({**job, "SLURM_RESTART_COUNT": "0"}) == "10.0.0.7:29500"
    assert find_meeting({**job, "SLURM_RESTART_COUNT": "1"}) == "10.0.0.7:29500#1"
    assert find_meeting({"SLURM_RESTART_COUNT": "1"}) == ""
