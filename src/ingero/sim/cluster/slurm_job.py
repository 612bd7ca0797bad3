"""A torchrun job in Slurm: its batch script, what Slurm says of it, and the steps that its log shows.

The script is what a user of Slurm writes: one task on each node, torchrun in each, and requeueing allowed. Each run of
the job (the first, and one after each requeue) has a log of its own.
Source: sbatch(1), srun(1), scontrol(1); PyTorch's ``torchrun`` documentation.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from ingero.closing import Closing
from ingero.errors import BadDataError, IngeroError
from ingero.sim.cluster.savings import StepPoint
from ingero.sim.cluster.slurm import RunningSlurm
from ingero.sim.cluster.torch_job import JobFile
from ingero.telemetry.clock import Clock

_SCRIPT: Final = """\
#!/bin/sh
#SBATCH --nodes={n_ranks} --ntasks-per-node=1 --requeue --open-mode=append --output={folder}/batch.log
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=eth0 TMPDIR={folder}
exec srun --kill-on-bad-exit=1 --unbuffered --output={folder}/run-"${{SLURM_RESTART_COUNT:-0}}".log \\
  sh -c 'exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node 1 \\
    --node-rank "$SLURM_NODEID" --rdzv-id "$SLURM_JOB_ID" --master-addr "$MASTER_ADDR" --master-port 29500 "$@"' \\
  {command}
"""
_STEP: Final = re.compile(
    r"\bstep[ =:]+(\d+)(?![\d.])", re.IGNORECASE
)  # not "STEP 1.0 CANCELLED" of Slurm
_FIELD: Final = re.compile(r"\b(JobState|Restarts|NodeList)=(\S+)")
_NONE: Final = "(null)"
_N_LINES: Final = 8
_ERROR: Final = re.compile(r"^(\[rank\d+\]: )?[\w.]+(Error|Exception)\b|failed \(exitcode: ")
"""A rank's error as Python and torchrun write it, and how torchrun says that one has ended."""
_FOLLOWS: Final = re.compile(r"\b(ChildFailedError|SignalException)\b")
"""What torchrun raises itself once a rank has failed, or was asked to end."""
OVER: Final = frozenset({
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE",
})  # fmt: skip
"""States that a job does not leave by itself. Source: squeue(1), JOB STATE CODES."""


@dataclass(frozen=True, slots=True)
class SlurmJobState:
    """What Slurm says of a job.

    Attributes:
        name: Such as ``RUNNING``.
        n_restarts: How often it was requeued.
        nodes: Where it runs or ran last, as Slurm writes it, such as ``host-[0-1,3-4]``; empty while it waits.
    """

    name: str = "PENDING"
    n_restarts: int = 0
    nodes: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in any way."""
        return self.name in OVER


def parse_job(text: str) -> SlurmJobState:
    """A job as ``scontrol -o show job`` prints it.

    Raises:
        BadDataError: Its state is not there.
    """
    found = {name: value for name, value in _FIELD.findall(text) if value != _NONE}
    if "JobState" not in found:
        raise BadDataError(f"not a job of scontrol: {text[:80]!r}")
    return SlurmJobState(
        found["JobState"], int(found.get("Restarts", "0")), found.get("NodeList", "")
    )


def find_steps(text: str) -> list[int]:
    """Numbers of the steps that lines of a training log show, as ``step 120 loss 0.31`` does, in their order."""
    return [int(number) for number in _STEP.findall(text)]


def write_script(job: JobFile, n_ranks: int, folder: Path) -> str:
    """The batch script that runs a file by torchrun, one rank on each of so many nodes."""
    command = shlex.join([str(job.python), str(job.file), *job.arguments])
    return _SCRIPT.format(n_ranks=n_ranks, folder=folder, command=command)


def find_failure(lines: Sequence[str]) -> Sequence[str]:
    """The lines of a log that say best why a job failed: its first errors, or its last lines where none is seen.

    srun ends the other ranks when one has failed, so that the last lines are theirs, who only got a signal.
    """
    errors = [one for one in lines if _ERROR.search(one) and not _FOLLOWS.search(one)]
    return errors[:_N_LINES] or lines[-_N_LINES:]


@dataclass(slots=True)
class _RunLog:
    """The log of one run of the job as far as it was read."""

    file: IO[str]
    points: list[StepPoint] = field(default_factory=list)
    rest: str = ""

    def read(self, clock: Clock) -> None:
        """Take the lines that came since the last time, as of when the file was written last.

        What is no whole line yet waits. A number that does not grow is no step: other lines have the word too.
        """
        age_ns = clock.wall_ns() - os.fstat(self.file.fileno()).st_mtime_ns
        now_ns = clock.mono_ns() - max(age_ns, 0)
        lines, newline, self.rest = (self.rest + self.file.read()).rpartition("\n")
        last = self.points[-1].step if self.points else -1
        reached = max(find_steps(lines + newline), default=last)
        if reached > last:
            self.points.append(StepPoint(now_ns, reached))


class SlurmJob(Closing):
    """A submitted job.

    Args:
        slurm: Where.
        job: What torchrun runs.
        n_ranks: On so many nodes.
        folder: Of its script, its logs and its working directory.
        clock: Both clocks.

    Attributes:
        job_id: As Slurm calls it.
        state: What Slurm said last.

    Raises:
        IngeroError: Slurm refuses it.
    """

    def __init__(
        self, slurm: RunningSlurm, job: JobFile, n_ranks: int, folder: Path, clock: Clock
    ) -> None:
        script = folder / "job.sh"
        script.write_text(write_script(job, n_ranks, folder), encoding="utf-8")
        self._slurm = slurm
        self._folder = folder
        self._clock = clock
        self._runs: dict[int, _RunLog] = {}
        self.state = SlurmJobState()
        self.job_id = slurm.run("sbatch", "--parsable", f"--chdir={folder}", str(script)).strip()

    def ask(self) -> None:
        """Ask Slurm for its state.

        Raises:
            IngeroError: Slurm does not answer, or the job ended of an error; the message has its last words.
        """
        self.state = parse_job(self._slurm.run("scontrol", "-o", "show", "job", self.job_id))
        if self.state.is_over and self.state.name != "COMPLETED":
            raise IngeroError(
                f"Slurm ended the job as {self.state.name}: {self._read_end()}",
                hint="does the script run under torchrun?",
            )

    def read(self) -> None:
        """Read what the logs of its runs show of their steps."""
        for number in range(self.state.n_restarts + 1):
            path = self._folder / f"run-{number}.log"
            if number not in self._runs and path.exists():
                self._runs[number] = _RunLog(path.open(encoding="utf-8", errors="replace"))
        for run in self._runs.values():
            run.read(self._clock)

    def steps(self, number: int) -> Sequence[StepPoint]:
        """When which step was seen in the log of a run; 0 is the first, 1 the one after the first requeue."""
        return self._runs[number].points if number in self._runs else ()

    def _read_end(self) -> str:
        for path in sorted(self._folder.glob("run-*.log"), reverse=True):
            lines = [one.strip() for one in path.read_text(errors="replace").splitlines()]
            failure = find_failure([one for one in lines if one])
            if failure:
                return " | ".join(failure)
        return "it said nothing"

    def close(self) -> None:
        """Close its logs."""
        for run in self._runs.values():
            run.file.close()
