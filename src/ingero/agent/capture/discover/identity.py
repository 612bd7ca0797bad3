"""Who a process is: its rank and job as its launcher set it, its container, its start time.

All of it is read from ``/proc``, from the target's environment and cgroup, never from our own. A process is the pair of
pid and start time, because pids are used again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.cgroups import CgroupMembership, choose_path, seen_cgroups
from ingero.agent.capture.discover.gpu_views import read_gpu_view
from ingero.agent.capture.kernel.regular_files import read_inside
from ingero.model.gpu_view import GpuView
from ingero.model.recording import ProcessRank
from ingero.wire.process_resource import ResourceKey, join_devices

_PROC: Final = Path("/proc")
_UNKNOWN: Final = -1

_LAUNCHERS: Final = (
    # name, rank, local rank, world size. Sources: torchrun's documented environment; Slurm srun(1) output environment;
    # Open MPI 5 mpirun(1); MPICH's PMI-1.
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("pmi", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)
_JOBS: Final = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID")
_NO_JOB: Final = {"", "none"}
"""The second is what torchrun sets without ``--rdzv-id``, for every job alike."""
_CONTAINER: Final = re.compile(r"([0-9a-f]{64})(?!.*[0-9a-f]{64})")
_POD: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})"
)
_POD_NAMES: Final = ("POD_NAME", "MY_POD_NAME", "K8S_POD_NAME", "HOSTNAME")
_NAMESPACES: Final = ("POD_NAMESPACE", "MY_POD_NAMESPACE", "K8S_NAMESPACE")
"""Usual names of downward-API variables; a pod's host name is its name unless its spec says otherwise."""
_NAMESPACE_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_MAX_NAME_CHARS: Final = 253  # RFC 1123 subdomain, as Kubernetes limits names
_SLURM_CGROUP: Final = re.compile(r"/job_(\d+)(?:/step_(\w+))?")
"""Of ``cgroup.conf``'s plug-ins for both versions; a step is a number, ``batch``, ``extern`` or ``interactive``."""

_EMPTY_READ_S: Final = 0.002
MAX_EMPTY_READS: Final = 100
"""A process without any variable costs so many."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A Kubernetes pod; empty text where nothing is known.

    Attributes:
        uid: From the cgroup's path.
        name: As the pod itself was given it.
        namespace: Its namespace.
    """

    uid: str = ""
    name: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What was given to a process's container; empty where nothing is known.

    Attributes:
        container: The container's name in its pod, as the kubelet says, as is the next.
        devices: As CDI names devices, such as ``nvidia.com/gpu=GPU-8f…``.
        gpus: Which GPUs the process is shown; None where nobody looked.
    """

    container: str = ""
    devices: tuple[str, ...] = ()
    gpus: GpuView | None = None


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """A step of a Slurm job; empty text where nothing is known.

    Attributes:
        job: The job's id.
        step: The step's id, or its name where it has one: ``batch``, ``extern``, ``interactive``.
        node: What Slurm calls the node, which need not be its host name.
    """

    job: str = ""
    step: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What is known of a process; empty text and -1 where nothing is.

    Attributes:
        pid: Its thread group.
        start_ticks: When it started, in clock ticks since boot.
        name: Its command name.
        launcher: Whose variables gave the rank.
        place: Rank, local rank and world size.
        job: The job's id.
        cgroup: Path of its cgroup, from the hierarchy's root on.
        container: 64-digit container id.
        pod: Its Kubernetes pod.
        slurm: Its step of a Slurm job.
        meeting: Where the ranks of its job meet; see `find_meeting`.
        assignment: What was given to its container.
    """

    pid: int
    start_ticks: int = 0
    name: str = ""
    launcher: str = ""
    place: ProcessRank = field(default_factory=ProcessRank)
    job: str = ""
    cgroup: str = ""
    container: str = ""
    pod: Pod = field(default_factory=Pod)
    slurm: SlurmStep = field(default_factory=SlurmStep)
    meeting: str = ""
    assignment: Assignment = field(default_factory=Assignment)

    @property
    def resource(self) -> tuple[tuple[str, str], ...]:
        """What is known of where it runs, as OpenTelemetry's resource attributes, sorted by name."""
        known = {
            ResourceKey.K8S_NAMESPACE_NAME: self.pod.namespace,
            ResourceKey.K8S_POD_NAME: self.pod.name,
            ResourceKey.K8S_POD_UID: self.pod.uid,
            ResourceKey.K8S_CONTAINER_NAME: self.assignment.container,
            ResourceKey.CONTAINER_ID: self.container,
            ResourceKey.DEVICE_IDS: join_devices(self.assignment.devices),
            ResourceKey.SLURM_JOB_ID: self.slurm.job,
            ResourceKey.SLURM_STEP_ID: self.slurm.step,
            ResourceKey.SLURM_NODE_NAME: self.slurm.node,
        }
        return tuple(sorted((str(key), value) for key, value in known.items() if value))


def parse_environment(data: bytes) -> dict[str, str]:
    """The variables in the contents of ``/proc/PID/environ``; of a repeated one the first counts, as for getenv()."""
    variables: dict[str, str] = {}
    for item in data.split(b"\0"):
        name, sign, value = item.partition(b"=")
        if sign:
            variables.setdefault(name.decode("utf-8", "replace"), value.decode("utf-8", "replace"))
    return variables


def find_place(variables: dict[str, str]) -> tuple[str, ProcessRank]:
    """The launcher and the process's place in the job; ``("", ProcessRank())`` when no launcher is known.

    Inside a Slurm step that runs torchrun both sets are there, and torchrun's are the ranks of the job's processes.
    """
    for launcher, rank, local_rank, world_size in _LAUNCHERS:
        if variables.get(rank, "").isdecimal():
            numbers = [variables.get(name, "") for name in (rank, local_rank, world_size)]
            return launcher, ProcessRank(
                *(int(text) if text.isdecimal() else _UNKNOWN for text in numbers)
            )
    return "", ProcessRank()


def find_meeting(variables: dict[str, str]) -> str:
    """Where PyTorch's ranks meet, as every launcher of its jobs sets it; empty when this one sets none.

    ``MASTER_ADDR:MASTER_PORT``. A job that Slurm has requeued keeps its id and may meet in the same place, with other
    communicators: so many restarts follow as ``#1``. Source: sbatch(1), SLURM_RESTART_COUNT.
    """
    address, port, restarts = (
        variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT")
    )
    again = f"#{restarts}" if restarts.isdecimal() and int(restarts) else ""
    return f"{address}:{port}{again}" if address and port else ""


def parse_cgroup(memberships: Sequence[CgroupMembership]) -> tuple[str, str, str, SlurmStep]:
    """Path, container id, pod uid and Slurm step out of a process's cgroups; version 2's path is preferred.

    Of a path that is not known to its root, what is shown of it still has these.
    """
    everything = " ".join(one.path or one.shown for one in memberships)
    container, pod, job = (
        pattern.search(everything) for pattern in (_CONTAINER, _POD, _SLURM_CGROUP)
    )
    return (
        choose_path(memberships),
        container[1] if container else "",
        pod[1].replace("_", "-") if pod else "",
        SlurmStep(job[1], job[2] or "") if job else SlurmStep(),
    )


def parse_stat(text: str) -> tuple[str, int]:
    """Command name and start time in ticks out of ``/proc/PID/stat``; the name may hold spaces and brackets."""
    name = text[text.index("(") + 1 : text.rindex(")")]
    return name, int(text[text.rindex(")") + 1 :].split()[19])


def read_identity(
    pid: int, proc: Path = _PROC, *, n_reads: int = MAX_EMPTY_READS
) -> ProcessIdentity | None:
    """Who a process is; None when it is gone. What may not be read stays unknown.

    Args:
        pid: The process.
        proc: Where processes are shown.
        n_reads: How often an environment that is empty is read, 2 ms apart: it is inside of execve(2).
    """
    folder = proc / str(pid)
    try:
        name, start_ticks = parse_stat((folder / "stat").read_text(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None
    try:
        variables = parse_environment(_read_environment(folder, n_reads))
        gpus = read_gpu_view(folder, variables)
    except OSError:
        variables, gpus = {}, read_gpu_view(folder, None)
    try:
        path, container, pod_uid, slurm = parse_cgroup(seen_cgroups(proc).read(pid))
    except OSError:
        path = container = pod_uid = ""
        slurm = SlurmStep()
    launcher, place = find_place(variables)
    job = next(
        (variables[key] for key in _JOBS if variables.get(key, "none") not in _NO_JOB), slurm.job
    )
    return ProcessIdentity(
        pid,
        start_ticks,
        name,
        launcher,
        place,
        job,
        path,
        container,
        _find_pod(pod_uid, variables, folder) if pod_uid else Pod(),
        _find_slurm_step(variables, slurm),
        find_meeting(variables),
        Assignment(gpus=gpus),
    )


def _read_environment(folder: Path, n_reads: int) -> bytes:
    """What ``environ`` holds.

    Raises:
        OSError: The process is gone or a zombie, or it may not be read.
    """
    for n_left in reversed(range(n_reads)):
        if text := (folder / "environ").read_bytes():
            return text
        (folder / "exe").readlink()  # a zombie has none
        if n_left:
            time.sleep(_EMPTY_READ_S)
    return b""


def _find_slurm_step(variables: dict[str, str], cgroup: SlurmStep) -> SlurmStep:
    """The step of the environment, else of the cgroup, which Slurm itself wrote but not every site lets it write."""
    given = (
        variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME")
    )
    job, step, node = (text[:_MAX_NAME_CHARS] for text in given)
    if cgroup.job:
        is_same = job in {"", cgroup.job}
        return SlurmStep(cgroup.job, cgroup.step or (step if is_same else ""), node)
    return SlurmStep(job, step if job else "", node)


def _find_pod(uid: str, variables: dict[str, str], folder: Path) -> Pod:
    """The pod with its name and namespace: from the environment, the namespace else from its service account."""
    name, namespace = (
        next((variables[key] for key in keys if variables.get(key)), "")
        for keys in (_POD_NAMES, _NAMESPACES)
    )
    if not namespace:
        try:
            text = read_inside(folder / "root", _NAMESPACE_FILE, _MAX_NAME_CHARS)
        except OSError:
            text = b""
        namespace = text.decode("ascii", "replace").strip()
    return Pod(uid, name[:_MAX_NAME_CHARS], namespace[:_MAX_NAME_CHARS])
