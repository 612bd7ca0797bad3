"""A real training job: any script that `torchrun` runs, one rank on each host, started as torchrun starts it.

Nothing is put into the job. What goes wrong is done to its processes and their host, as it happens in a cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.agent.collectives.plugin import find_plugin
from ingero.closing import Closing
from ingero.config.environment import build_environment
from ingero.config.torch import find_torch_python
from ingero.errors import ConfigError, IngeroError, UnsupportedError
from ingero.sim.cluster.ports import find_free_ports
from ingero.sim.cluster.rendezvous import has_met
from ingero.sim.cluster.shares import WHOLE, ProcessorShare
from ingero.sim.runner import get_program

PULSE_S: Final = 0.1
"""One stop and what follows it, of `TorchJob.pulse`."""
N_SPINNERS: Final = 2
"""Neighbours of a rank that want its host's processor time all the time."""
_PORT: Final = 29500  # torchrun's default; each host has all ports to itself
_HOLD: Final = (
    'while [ "$1" != -- ]; do echo $$ >"$1" && shift || exit; done; shift; read -r go && exec "$@"'
)
_LIMIT_S: Final = 5.0
_BEGIN_LIMIT_S: Final = 30.0
"""For a program to come to the place in its step at which it makes its fault."""
_POLL_S: Final = 0.02
# Source: examples/jobs/inside.py.
_FAULT: Final = "INGERO_JOB_FAULT"
_FAULT_FILE: Final = "INGERO_JOB_FAULT_FILE"
_N_LINES: Final = 8
_FIND_TORCH: Final = """
import importlib.util, sys
sys.exit(None if importlib.util.find_spec("torch") else "No module named 'torch'")
"""
_LIBRARIES: Final = (
    "lib/python3*/site-packages/torch/lib/libtorch_cpu.so",
    "lib/python3*/site-packages/nvidia/*/lib/libnccl.so.2",
    "lib/python3*/site-packages/nvidia/*/lib/libcudart.so.*",
)


@dataclass(frozen=True, slots=True)
class JobFile:
    """What to run.

    Attributes:
        python: An interpreter that can import torch.
        file: The script.
        arguments: Its arguments.
    """

    python: Path
    file: Path
    arguments: tuple[str, ...] = ()

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Where the interpreter has Gloo, NCCL and CUDA's runtime, if that can be seen from outside."""
        root = self.python.parent.parent
        return tuple(path for pattern in _LIBRARIES for path in root.glob(pattern))


@dataclass(frozen=True, slots=True)
class JobHost:
    """Where one rank runs.

    Attributes:
        prefix: What a command line begins with to run there.
        address: How the others reach it.
        interface: The network device of that address.
        share: Its processor time.
    """

    prefix: tuple[str, ...]
    address: str
    interface: str
    share: ProcessorShare


def choose_job(file: str, arguments: Sequence[str], python: str) -> JobFile:
    """The job that a user named.

    Torch is looked for and not imported, which takes seconds: each rank does that, and says so where it fails.

    Args:
        file: The script.
        arguments: Its arguments.
        python: The interpreter; empty looks for one.

    Raises:
        ConfigError: There is no such script, or the interpreter has no torch.
        UnsupportedError: No interpreter has torch.
    """
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"--job {file}: there is no such file")
    found = Path(python).absolute() if python else find_torch_python()
    if found is None:
        raise UnsupportedError(
            "no Python here has PyTorch, which the job needs",
            hint="python3 -m venv ~/venv-torch && ~/venv-torch/bin/pip install torch==2.13.0 numpy;"
            " or name one: --python PATH",
        )
    try:
        result = subprocess.run(
            [found, "-c", _FIND_TORCH], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(f"--python {found}: {error.strerror}") from error
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it failed"])[-1]
        raise ConfigError(
            f"{found} cannot import torch: {reason}",
            hint=f"{found} -m pip install torch==2.13.0 numpy; or name another: --python PATH",
        )
    return JobFile(found, path, tuple(arguments))


@dataclass(slots=True)
class _Pulses:
    """Stops a process for part of every `PULSE_S`, until it is asked to end."""

    pid: int
    part: float
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Body of a thread."""
        try:
            while not self.stop.wait(PULSE_S * (1 - self.part)):
                os.kill(self.pid, signal.SIGSTOP)
                self.stop.wait(PULSE_S * self.part)
                os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            return


class TorchJob(Closing):
    """A held or running job; leaving the ``with`` block ends every rank.

    Args:
        job: What to run.
        hosts: By rank.
        folder: Where the ranks' output goes.
        name: The job's id, as a launcher would give it.
        inside: Faults that the program is asked to make itself, a kind and an amount by rank: ``slow-python:0.02``.
    """

    def __init__(
        self,
        job: JobFile,
        hosts: Sequence[JobHost],
        folder: Path,
        name: str,
        inside: Mapping[int, str] | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._file, self._inside = job.file.name, inside or {}
        self._folder = folder
        self._pulses: list[tuple[_Pulses, threading.Thread]] = []
        self._neighbours: list[subprocess.Popen[bytes]] = []
        self._is_breaking = False
        self._port = _PORT if hosts[0].prefix else find_free_ports(1)[0]
        shared = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RUN_ID": name,
            "TMPDIR": str(folder),  # removed after the run; ranks are killed and remove nothing
        }
        self._ranks = [self._start(job, rank, shared) for rank in range(len(hosts))]

    def _start(self, job: JobFile, rank: int, shared: Mapping[str, str]) -> subprocess.Popen[bytes]:
        host = self._hosts[rank]
        own = {
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": host.interface,
            "NCCL_SOCKET_IFNAME": host.interface,
            # What tells NCCL hosts apart: ranks of one host may not share a GPU, and ours share this machine's.
            "NCCL_HOSTID": f"{shared['TORCHELASTIC_RUN_ID']}-{rank}",
            "PYTHONUNBUFFERED": "1",
        }
        if rank in self._inside:
            own |= {_FAULT: self._inside[rank], _FAULT_FILE: str(self._fault_file(rank))}
        defaults = {
            "OMP_NUM_THREADS": "1",  # as torchrun sets it for more than one rank
            "NCCL_PROFILER_PLUGIN": str(find_plugin()),
        }
        environment = {**defaults, **build_environment({**shared, **own})}
        members = map(str, host.share.members)
        command = [*host.prefix, "/bin/sh", "-c", _HOLD, "rank", *members, "--"]
        with self._output(rank).open("wb") as output:
            return subprocess.Popen(
                [*command, str(job.python), str(job.file), *job.arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _fault_file(self, rank: int) -> Path:
        return self._folder / f"fault-{rank}"

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._ranks)

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended by itself, without an error."""
        return all(process.poll() == 0 for process in self._ranks)

    def read_kept_waiting(self) -> tuple[int, ...]:
        """By rank, how long its first thread was ready to run and did not, beyond its host's quota, in nanoseconds.

        Strangers on this machine did that. A rank that ended has 0.
        """
        return tuple(
            _read_waited(process.pid, host.share)
            for process, host in zip(self._ranks, self._hosts, strict=True)
        )

    def release(self) -> None:
        """Let every rank begin; until `divide`, their hosts divide the whole machine, as they only load libraries."""
        for host in self._hosts:
            host.share.limit(WHOLE)
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()

    def divide(self, *, has_begun: bool = False) -> bool:
        """Give every rank's host its own share of the processors and no more, once all have loaded what they need.

        Args:
            has_begun: It is known that they have; else it shows when all have come to where ranks meet.

        Returns:
            Whether it was time.
        """
        is_time = has_begun or all(has_met(pid, self._port) for pid in self.pids)
        for host in self._hosts if is_time else ():
            host.share.limit(1.0)
        return is_time

    def limit(self, rank: int, part: float) -> None:
        """From now on the rank's host has this part of its processor time."""
        self._hosts[rank].share.limit(part)

    def limit_reading(self, rank: int, bytes_per_s: int) -> None:
        """From now on the rank's host reads no more than this from its disks in a second."""
        self._hosts[rank].share.limit_reading(bytes_per_s)

    def crowd(self, rank: int) -> None:
        """From now on neighbours on the rank's host want all of its processor time."""
        for _ in range(N_SPINNERS):
            member = subprocess.Popen(
                [str(get_program().with_name("job")), "spin"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._neighbours.append(member)
            for members in self._hosts[rank].share.members:
                members.write_text(str(member.pid))

    def pulse(self, rank: int, part: float) -> None:
        """From now on the rank is stopped for this part of the time, a moment in each `PULSE_S`."""
        pulses = _Pulses(self.pids[rank], part)
        thread = threading.Thread(target=pulses.run, daemon=True)
        self._pulses.append((pulses, thread))
        thread.start()

    def begin_inside(self, ranks: Sequence[int]) -> None:
        """From now on the ranks' programs do to themselves what they were asked to at their start.

        Raises:
            UnsupportedError: One does not.
        """
        for rank in ranks:
            self._fault_file(rank).touch()
        until_s = time.monotonic() + _BEGIN_LIMIT_S
        for rank in ranks:
            self._await_inside(rank, until_s)

    def _await_inside(self, rank: int, until_s: float) -> None:
        file = self._fault_file(rank)
        seen = file.with_name(f"{file.name}.seen")
        while not seen.exists():
            if time.monotonic() > until_s:
                raise UnsupportedError(
                    f"{self._file} does not make the fault {self._inside[rank].partition(':')[0]}",
                    hint="programs in examples/jobs do, each some; see examples/jobs/inside.py",
                )
            time.sleep(_POLL_S)

    def pause(self, rank: int) -> None:
        """Stop a rank where it is."""
        self._ranks[rank].send_signal(signal.SIGSTOP)

    def kill(self, rank: int) -> None:
        """End a rank as if its node had been deleted; the others may end of it."""
        self._is_breaking = True
        self._ranks[rank].kill()
        self._ranks[rank].wait()

    def check(self, expected_dead: Sequence[int] = ()) -> None:
        """Raise when a rank failed by itself.

        Raises:
            IngeroError: It did; the message has its last words.
        """
        if self._is_breaking:
            return
        for rank, process in enumerate(self._ranks):
            if rank not in expected_dead and process.poll():
                raise IngeroError(
                    f"rank {rank} of the job ended with {process.returncode}:"
                    f" {self._read_end(rank)}",
                    hint="does the script run under torchrun?",
                )

    def _read_end(self, rank: int) -> str:
        with self._output(rank).open(errors="replace") as file:
            lines = deque((line.strip() for line in file), maxlen=_N_LINES)
        return " | ".join(filter(None, lines)) or "it said nothing"

    def close(self) -> None:
        """End every rank that still runs, and what was started beside it."""
        for pulses, thread in self._pulses:
            pulses.stop.set()
            thread.join()
        processes = (*self._ranks, *self._neighbours)
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait(_LIMIT_S)
            if process.stdin is not None:
                process.stdin.close()


def _read_waited(pid: int, share: ProcessorShare) -> int:
    """Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat"."""
    try:
        waited_ns = int(Path("/proc", str(pid), "schedstat").read_text().split()[1])
    except OSError:
        return 0
    return max(waited_ns - share.read_throttled(), 0)
