"""A real Slurm of several nodes on one host: ``slurmctld``, a ``slurmd`` per node and ``munged`` of Debian's packages.

All of it is private: its files, its key, its ports. The configuration overrides what the machine has, and no plug-in
needs cgroups. Every daemon ends with the thread that started it, however that ends (``setpriv --pdeathsig``).
Source: slurm.conf(5), setpriv(1); seen with Slurm 22.05 (Debian 12).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.config.environment import build_environment
from ingero.errors import IngeroError, RetryableError
from ingero.sim.cluster.ports import find_free_ports

START_TIMEOUT_S: Final = 60.0
COMMAND_TIMEOUT_S: Final = 20.0
PACKAGES: Final = "slurmctld slurmd slurm-client munge"
"""Debian's packages that have all of it."""
_PROGRAMS: Final = (
    "slurmctld",
    "slurmd",
    "munged",
    "scontrol",
    "sbatch",
    "srun",
    "setpriv",
)
_END_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL", "--")
_MUNGE_THREADS: Final = 4
"""A client that is held up by its quota holds one of them up."""
_JOIN: Final = 'echo $$ >"$1" && shift && exec "$@"'
_POLL_S: Final = 0.05
_N_CHARS: Final = 1000
# A requeued job waits for its old credentials to expire, 120 s by default: auth's cred_expire, slurm.conf(5).
_CONFIG: Final = """\
ClusterName=ingero
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
KillWait=5
MessageTimeout=30
TCPTimeout=15
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
"""


def why_no_slurm() -> str:
    """Why `run_slurm` cannot work here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in _PROGRAMS if find_program(name) is None]
    return f"no {', '.join(missing)} (Debian: {PACKAGES})" if missing else ""


def find_program(name: str) -> str | None:
    """The path of a program of Slurm or munge; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node.

    Attributes:
        name: As Slurm calls it.
        address: How the others reach it.
        prefix: What a command line begins with to run there.
        members: File of the cgroup that its ``slurmd`` and all that this starts are in; None for ours.
        weight: Of nodes that will do, Slurm takes the lightest first.
    """

    name: str
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    members: Path | None = None
    weight: int = 1


def build_local_nodes(count: int = 4) -> tuple[SlurmNode, ...]:
    """Nodes ``h1`` … of this host."""
    return tuple(SlurmNode(f"h{number + 1}") for number in range(count))


class RunningSlurm:
    """A Slurm that runs.

    Attributes:
        nodes: Names of its nodes.
        environ: What its commands need in their environment.
        folder: Where its files are.
        daemons: Process id of each node's ``slurmd``, by node.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.environ: Mapping[str, str] = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.folder = folder
        self.daemons: dict[str, int] = {}

    def run(self, program: str, *arguments: str) -> str:
        """The output of one of its commands.

        Raises:
            RetryableError: It did not end in time.
            IngeroError: It failed.
        """
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True, text=True, check=False, env=build_environment(self.environ), cwd=self.folder,
                timeout=COMMAND_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RetryableError(f"{program} did not end in {COMMAND_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise IngeroError(f"{program} failed: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """State by node, as ``sinfo`` shows it in short."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)


@contextmanager
def run_slurm(
    folder: Path,
    nodes: Sequence[SlurmNode],
    address: str = "127.0.0.1",
    settings: Mapping[str, str] | None = None,
) -> Iterator[RunningSlurm]:
    """Start a cluster, wait until all nodes are idle, and stop it at the end.

    What jobs left behind on nodes with a cgroup of their own ends with that cgroup.

    Args:
        folder: An empty one for its files. Its path must be short: it holds a Unix socket.
        nodes: Its nodes.
        address: Of the controller, as nodes see it.
        settings: Further ones of slurm.conf.

    Raises:
        IngeroError: It did not start; the message holds what it said.
    """
    _write_config(folder, nodes, address, settings or {})
    slurm = RunningSlurm(folder, [node.name for node in nodes])
    environ = build_environment(slurm.environ)
    with ExitStack() as stack, (folder / "out").open("wb") as out:

        def start(prefix: Sequence[str], name: str, *arguments: str) -> int:
            program = find_program(name)
            assert program is not None, name
            process = subprocess.Popen(
                [*prefix, *_END_WITH_US, program, *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches us alone
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process.pid

        key = ("--key-file", "munge.key", "--socket", "munge.sock", "--seed-file", "munge.seed")
        files = (*key, "--pid-file", "munge.pid", "--log-file", "munge.log")
        given = [str(folder / one) if not one.startswith("--") else one for one in files]
        start((), "munged", "--foreground", "--force", f"--num-threads={_MUNGE_THREADS}", *given)
        _await(folder, (folder / "munge.sock").exists)
        start((), "slurmctld", "-D")
        for node in nodes:
            (folder / f"spool.{node.name}").mkdir()
            slurm.daemons[node.name] = start(_enter(node), "slurmd", "-D", "-N", node.name)
        _await(folder, lambda: _are_idle(slurm))
        yield slurm


def _enter(node: SlurmNode) -> tuple[str, ...]:
    """What runs a command on a node, in its cgroup."""
    if node.members is None:
        return node.prefix
    return (*node.prefix, "/bin/sh", "-c", _JOIN, "slurmd", str(node.members))


def _await(folder: Path, check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not check():
        if time.monotonic() > deadline:
            logs = [folder / "out", folder / "munge.log", folder / "slurmctld.log"]
            text = "\n".join(
                f"{log.name}: …{log.read_text(errors='replace')[-_N_CHARS:]}"
                for log in logs
                if log.exists()
            )
            raise IngeroError(f"Slurm did not start within {START_TIMEOUT_S:.0f} s:\n{text}")
        time.sleep(_POLL_S)


def _are_idle(slurm: RunningSlurm) -> bool:
    try:
        return set(slurm.states().values()) == {"idle"}
    except IngeroError:
        return False  # not up yet


def _write_config(
    folder: Path, nodes: Sequence[SlurmNode], address: str, settings: Mapping[str, str]
) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    host = socket.gethostname().partition(".")[0]
    first, *ports = find_free_ports(len(nodes) + 1)
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} NodeHostname={host} Port={port} CPUs=1"
        f" Weight={node.weight} State=UNKNOWN"
        for node, port in zip(nodes, ports, strict=True)
    ]
    lines += [f"{name}={value}" for name, value in settings.items()]
    lines.append("PartitionName=all Nodes=ALL Default=YES State=UP")
    text = _CONFIG.format(host=host, address=address, port=first, folder=folder)
    (folder / "slurm.conf").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
