"""Cgroups as an agent in a container sees them: planted machines of each version. The kernel's own: tests/kernel."""

import os

import pytest

from ingero.agent.capture.discover.cgroups import Cgroups, choose_path, parse_memberships
from ingero.agent.capture.discover.identity import SlurmStep, parse_cgroup, read_identity
from ingero.agent.diagnosis.counters import CounterFiles

AGENT_POD, AGENT = "11111111-4f89-11d3-9a0c-0305e82c3301", "a1" * 32
POD, CONTAINER = "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "9d1b0a7c" * 8
SLICE, OTHER_SLICE = (
    f"kubepods-burstable-pod{one.replace('-', '_')}.slice" for one in (AGENT_POD, POD)
)
DRIVERS = {
    "systemd, containerd": (
        f"/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{AGENT}.scope",
        f"/kubepods.slice/kubepods-burstable.slice/{OTHER_SLICE}/cri-containerd-{CONTAINER}.scope",
    ),
    "systemd, CRI-O": (
        f"/kubepods.slice/kubepods-burstable.slice/{SLICE}/crio-{AGENT}.scope/container",
        f"/kubepods.slice/kubepods-burstable.slice/{OTHER_SLICE}/crio-{CONTAINER}.scope/container",
    ),
    "cgroupfs, containerd": (
        f"/kubepods/burstable/pod{AGENT_POD}/{AGENT}",
        f"/kubepods/pod{POD}/{CONTAINER}",
    ),
    "cgroupfs, CRI-O": (
        f"/kubepods/burstable/pod{AGENT_POD}/crio-{AGENT}",
        f"/kubepods/burstable/pod{POD}/crio-{CONTAINER}",
    ),
    "systemd, docker": (
        f"/kubepods.slice/kubepods-besteffort.slice/{SLICE}/docker-{AGENT}.scope",
        f"/kubepods.slice/{OTHER_SLICE}/docker-{CONTAINER}.scope",
    ),
}  # fmt: skip


class Node:
    """A machine that an agent in a container sees.

    Args:
        folder: Where it is planted: ``proc``, the host's files under ``proc/1/root``, the container's under ``own``.
        agent: Cgroup of the agent's container, which is the root of its cgroup namespace.
        has_namespace: Whether the container has a cgroup namespace of its own.
    """

    def __init__(self, folder, agent, has_namespace=True):
        self.folder, self.agent, self.has_namespace = folder, agent, has_namespace
        self.proc = folder / "proc"
        self.mounts = {"1": [], "self": []}
        (self.proc / "self").mkdir(parents=True)

    def show(self, path):
        """A path as the kernel shows it to the agent. Linux, fs/kernfs/dir.c, kernfs_path_from_node."""
        return f"/{os.path.relpath(path, self.agent)}" if self.has_namespace else path

    def mount(self, place, kind, options, *, host=True, own=True):
        """A hierarchy, with the agent's container in it."""
        top = self.proc / "1/root" / place
        (top / self.agent.lstrip("/")).mkdir(parents=True)
        if host:
            self._mount("1", f"/{place}", self.show("/"), kind, options)
        if own:
            (self.folder / "own" / place).parent.mkdir(parents=True, exist_ok=True)
            # The container's mount is the same cgroup, with the same inode.
            (self.folder / "own" / place).symlink_to(top / self.agent.lstrip("/"))
            self._mount("self", f"{self.folder}/own/{place}", self.show(self.agent), kind, options)
        return top

    def _mount(self, process, place, root, kind, options):
        root = "/" if root == "/." else root
        line = f"31 23 0:28 {root} {place} rw - {kind} {kind} rw,{options}\n"
        self.mounts[process].append(line)
        (self.proc / process / "mountinfo").write_text("".join(self.mounts[process]))

    def start(self, pid, *lines):
        """A process, in ``hierarchy:controllers:path``, paths as the host has them."""
        folder = self.proc / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "task" / str(pid) / "schedstat").write_text("1 1 1\n")
        fields = " ".join(["S", "1", *["0"] * 40])
        (folder / "stat").write_text(f"{pid} (train) {fields}\n")
        shown = []
        for line in lines:
            start, _, path = line.rpartition(":")
            shown.append(f"{start}:{self.show(path).removesuffix('.')}\n")
        (folder / "cgroup").write_text("".join(shown))
        (folder / "environ").write_bytes(b"HOME=/\0")

    def limit(self, folder, **contents):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name.replace("__", ".")).write_text(text)

    def read_quota(self, pid):
        """What the narrowest limit is, and for how long and how often it held back; None without one."""
        reading = CounterFiles(self.proc, Cgroups(self.proc)).read(pid, 0)
        quota = min(reading.quotas, key=lambda one: one.n_processors, default=None)
        return quota and (quota.n_processors, *reading.throttled[quota.cgroup])


@pytest.fixture(params=sorted(DRIVERS))
def paths(request):
    """Cgroups of the agent and of another pod."""
    return DRIVERS[request.param]


def test_a_path_is_shown_from_the_agents_own_cgroup_on(tmp_path):
    """What the planted machines show is what this kernel shows: see tests/kernel/test_cgroup_namespace.py."""
    node = Node(tmp_path, "/kubepods/podA/a")
    assert node.show("/kubepods/podB/b") == "/../../podB/b"
    assert node.show("/") == "/../../.."
    assert node.show("/kubepods/podA/a/x") == "/x"


def test_the_limit_of_another_pod_is_found_on_version_2(tmp_path, paths):
    agent, other = paths
    node = Node(tmp_path, agent)
    top = node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate")
    node.start(7, f"0::{other}")
    node.limit(top / agent.lstrip("/"), cpu__max="10000 100000\n", cpu__stat="", cgroup__procs="")
    stat = "nr_throttled 4\nthrottled_usec 40\n"
    node.limit(
        top / other.lstrip("/"), cpu__max="50000 100000\n", cpu__stat=stat, cgroup__procs="7\n"
    )
    assert node.read_quota(7) == (0.5, 40_000, 4)


def test_the_limit_of_another_pods_slice_counts_where_it_is_narrower(tmp_path, paths):
    agent, other = paths
    node = Node(tmp_path, agent)
    top = node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate")
    node.start(7, f"0::{other}")
    node.limit(top / other.lstrip("/"), cpu__max="50000 100000\n", cpu__stat="")
    pod = (top / other.lstrip("/")).parent
    node.limit(pod, cpu__max="20000 100000\n", cpu__stat="nr_throttled 1\n", cgroup__procs="")
    assert node.read_quota(7) == (0.2, 0, 1)


@pytest.mark.parametrize("has_namespace", [True, False])
def test_the_limit_of_another_pod_is_found_on_version_1(tmp_path, paths, has_namespace):
    agent, other = paths
    node = Node(tmp_path, agent, has_namespace)
    top = node.mount("sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct")
    node.mount("sys/fs/cgroup/unified", "cgroup2", "nsdelegate")  # hybrid: without the processors
    node.start(7, f"4:cpuacct,cpu:{other}", "1:name=systemd:/", "0::/")
    quota = {"cpu__cfs_quota_us": "10000\n", "cpu__cfs_period_us": "100000\n"}
    node.limit(top / agent.lstrip("/"), **quota, cgroup__procs="")
    quota["cpu__cfs_quota_us"] = "25000\n"
    stat = "nr_throttled 4\nthrottled_time 77\n"
    node.limit(top / other.lstrip("/"), **quota, cpu__stat=stat, cgroup__procs="7\n")
    assert node.read_quota(7) == (0.25, 77, 4)


@pytest.mark.parametrize("has_namespace", [True, False])
def test_without_the_hosts_root_another_pods_limit_is_not_known_nor_taken_for_the_agents(
    tmp_path, paths, has_namespace
):
    agent, other = paths
    node = Node(tmp_path, agent, has_namespace)
    top = node.mount("sys/fs/cgroup/cpu", "cgroup", "cpu", host=False)
    node.start(7, f"4:cpu:{other}")
    quota = {"cpu__cfs_quota_us": "10000\n", "cpu__cfs_period_us": "100000\n"}
    node.limit(top / agent.lstrip("/"), **quota, cpu__stat="", cgroup__procs="")
    node.limit(top / other.lstrip("/"), **quota, cpu__stat="", cgroup__procs="")
    assert node.read_quota(7) is None
    node.start(8, f"4:cpu:{agent}")
    assert node.read_quota(8) == (0.1, 0, 0)  # the agent's own is


FREEZERS = {
    2: ("cgroup2", "nsdelegate", "0::", "populated 1\nfrozen {}\n", ("1", "0")),
    1: ("cgroup", "freezer", "6:freezer:", "{}\n", ("FROZEN", "THAWED")),
}


@pytest.mark.parametrize("has_namespace", [True, False])
@pytest.mark.parametrize("version", sorted(FREEZERS))
def test_a_process_of_another_pod_is_frozen_when_its_cgroup_is(
    tmp_path, paths, has_namespace, version
):
    agent, other = paths
    kind, options, line, text, states = FREEZERS[version]
    node = Node(tmp_path, agent, has_namespace)
    top = node.mount("sys/fs/cgroup", kind, options)
    node.start(7, "3:cpu:/", f"{line}{other}")
    node.start(8, "3:cpu:/", f"{line}{agent}")
    node.start(9, "3:cpu:/", f"{line}/")  # the root has no such file
    file = {1: "freezer__state", 2: "cgroup__events"}[version]
    for path, state in zip((other, agent), states, strict=True):
        node.limit(top / path.lstrip("/"), **{file: text.format(state)})
    cgroups = Cgroups(node.proc)
    assert [cgroups.is_frozen(pid) for pid in (7, 8, 9, 10)] == [True, False, False, False]


def test_each_pod_and_container_is_known_with_the_hosts_path(tmp_path, paths):
    agent, other = paths
    node = Node(tmp_path, agent)
    node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate")
    for pid, path in ((7, other), (8, agent), (9, f"{agent}/inner")):
        node.start(pid, f"0::{path}")
    found = [read_identity(pid, node.proc, n_reads=1) for pid in (7, 8, 9)]
    assert [one.cgroup for one in found] == [other, agent, f"{agent}/inner"]
    assert [one.pod.uid for one in found] == [POD, AGENT_POD, AGENT_POD]
    assert [one.container for one in found] == [CONTAINER, AGENT, AGENT]


def test_without_the_hosts_root_a_pod_is_known_by_what_is_shown_of_its_path(tmp_path, paths):
    agent, other = paths
    node = Node(tmp_path, agent)
    node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate", host=False)
    node.start(7, f"0::{other}")
    found = read_identity(7, node.proc, n_reads=1)
    assert (found.cgroup, found.pod.uid, found.container) == ("", POD, CONTAINER)


def test_another_container_of_the_agents_pod_is_in_that_pod(tmp_path):
    agent = f"/kubepods/burstable/pod{AGENT_POD}/{AGENT}"
    node = Node(tmp_path, agent)
    node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate")
    node.start(7, f"0::/kubepods/burstable/pod{AGENT_POD}/{CONTAINER}")
    assert (node.proc / "7/cgroup").read_text() == f"0::/../{CONTAINER}\n"
    found = read_identity(7, node.proc, n_reads=1)
    assert (found.pod.uid, found.container) == (AGENT_POD, CONTAINER)


def test_the_hosts_folder_of_a_container_is_used_where_it_is_mounted(tmp_path):
    """As with a volume of ``/sys/fs/cgroup``, for a container that has no pids of the host."""
    agent, other = DRIVERS["cgroupfs, containerd"]
    node = Node(tmp_path, agent)
    top = node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate", host=False)
    node._mount("self", str(top), node.show("/"), "cgroup2", "nsdelegate")
    node.start(7, f"0::{other}")
    assert [one.path for one in Cgroups(node.proc).read(7)] == [other]


def test_a_part_of_the_hierarchy_outside_of_our_namespace_does_not_pass_for_its_root(tmp_path):
    node = Node(tmp_path, "/kubepods/podA/a")
    node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate", host=False)
    part = tmp_path / "part"
    (part / "b").mkdir(parents=True)
    node._mount("self", str(part), node.show("/kubepods/podB"), "cgroup2", "nsdelegate")
    node.start(7, "4:cpu:/kubepods/podB/b", "0::/kubepods/podB/b")
    node.limit(part / "b", cpu__max="50000 100000\n", cpu__stat="", cgroup__procs="7\n")
    assert choose_path(Cgroups(node.proc).read(7)) == ""
    assert node.read_quota(7) == (0.5, 0, 0)  # its files can be read all the same


def test_a_cgroup_s_id_is_that_of_the_hosts_path(tmp_path, paths):
    agent, other = paths
    node = Node(tmp_path, agent)
    top = node.mount("sys/fs/cgroup", "cgroup2", "nsdelegate")
    folder = top / other.lstrip("/")
    (folder / "inner").mkdir(parents=True)
    cgroups = Cgroups(node.proc)
    assert cgroups.find_root() == top
    assert cgroups.find_id(other) == folder.stat().st_ino
    assert set(cgroups.find_ids(other)) == {one.stat().st_ino for one in (folder, folder / "inner")}
    assert (cgroups.find_id("/gone"), cgroups.find_ids("/gone"), cgroups.find_id("")) == (0, (), 0)


def test_a_machine_without_version_2_has_no_ids(tmp_path):
    node = Node(tmp_path, "/a")
    node.mount("sys/fs/cgroup/cpu", "cgroup", "cpu")
    assert (Cgroups(node.proc).find_root(), Cgroups(node.proc).find_id("/a")) == (None, 0)


def test_of_several_mounts_in_one_place_the_last_is_seen(tmp_path):
    node = Node(tmp_path, "/a")
    node._mount("self", str(tmp_path), "/../b", "cgroup2", "x")
    node._mount("self", str(tmp_path), "/", "cgroup2", "x")
    assert [one.root for one in Cgroups(node.proc)._hierarchies[""].mounts] == [(0, ())]


def test_a_line_that_is_none_is_left_out():
    assert parse_memberships("x:y\n\n0::/a:b\n")[0].path == "/a:b"
    assert parse_cgroup(parse_memberships("")) == ("", "", "", SlurmStep())
