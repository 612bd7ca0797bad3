"""A real Slurm of several nodes on one host: ``slurmctld``, a ``slurmd`` per node and ``munged`` of Debian's packages.

Each node has a port of its own, the configuration overrides what the machine has, and no plug-in needs cgroups.
Source: slurm.conf(5); seen with Slurm 22.05 (Debian 12).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ingero.config.environment import build_environment
from ingero.errors import IngeroError
from ingero.testing.waiting import wait_until

_PROGRAMS: Final = ("slurmctld", "slurmd", "munged", "scontrol", "sbatch")
_CONFIG: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
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
    return f"no {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else ""


def find_program(name: str) -> str | None:
    """The path of a program of Slurm or munge; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


class RunningSlurm:
    """A Slurm that runs.

    Attributes:
        nodes: Names of its nodes.
        environ: What its commands need in their environment.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.environ: Mapping[str, str] = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.folder = folder

    def run(self, program: str, *arguments: str) -> str:
        """The output of one of its commands.

        Raises:
            IngeroError: It failed.
        """
        done = subprocess.run(
            [program, *arguments],
            capture_output=True, text=True, check=False, env=build_environment(self.environ), cwd=self.folder,
        )  # fmt: skip
        if done.returncode:
            raise IngeroError(f"{program} failed: {done.stderr}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """State by node, as ``sinfo`` shows it in short."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)


@contextmanager
def run_slurm(folder: Path, n_nodes: int = 4) -> Iterator[RunningSlurm]:
    """Start a cluster with nodes ``h1`` …, wait until all are idle, and stop it at the end.

    Args:
        folder: An empty one for its files. Its path must be short: it holds a Unix socket.
        n_nodes: How many nodes.

    Raises:
        TimeoutError: It did not start.
    """
    names = [f"h{number + 1}" for number in range(n_nodes)]
    _write_config(folder, names)
    slurm = RunningSlurm(folder, names)
    environ = build_environment(slurm.environ)
    with ExitStack() as stack, (folder / "out").open("wb") as out:

        def start(name: str, *arguments: str) -> None:
            program = find_program(name)
            assert program is not None, name
            process = subprocess.Popen([program, *arguments], env=environ, stdout=out, stderr=out)
            stack.callback(process.wait)
            stack.callback(process.kill)

        key = ("--key-file", "munge.key", "--socket", "munge.sock", "--seed-file", "munge.seed")
        files = (*key, "--pid-file", "munge.pid", "--log-file", "munge.log")
        given = [str(folder / one) if not one.startswith("--") else one for one in files]
        start("munged", "--foreground", "--force", "--num-threads=1", *given)
        wait_until((folder / "munge.sock").exists)
        start("slurmctld", "-D")
        for name in names:
            (folder / f"spool.{name}").mkdir()
            start("slurmd", "-D", "-N", name)
        wait_until(lambda: _are_idle(slurm))
        yield slurm


def _are_idle(slurm: RunningSlurm) -> bool:
    try:
        return set(slurm.states().values()) == {"idle"}
    except IngeroError:
        return False  # not up yet


def _write_config(folder: Path, names: Sequence[str]) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    host = socket.gethostname().partition(".")[0]
    first, *ports = _free_ports(len(names) + 1)
    lines = [
        f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1 State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES State=UP")
    text = _CONFIG.format(host=host, port=first, folder=folder) + "\n".join(lines) + "\n"
    (folder / "slurm.conf").write_text(text, encoding="utf-8")


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now; Slurm cannot choose them itself."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
