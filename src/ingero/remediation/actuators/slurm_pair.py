"""Pair tests in Slurm: a batch job on both nodes, whose result comes back as the job's comment.

So the remediator needs no file system that the nodes have too, no port that they reach and no process that waits, and
another remediator can go on. ``--time`` and ``--deadline`` end a job that nobody asks for any more.
Source: sbatch(1), scontrol(1), squeue(1), scancel(1), sinfo(1); seen with Slurm 22.05: a job's owner may change the
comment while it runs; a job that has ended is shown for ``MinJobAge``, 300 s by default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ingero.errors import PermanentError, RetryableError
from ingero.remediation import pair_program
from ingero.remediation.actuators.pair_runner import PairJob, PairJobState
from ingero.remediation.actuators.slurm import SlurmActuator
from ingero.remediation.config import SlurmConfig
from ingero.remediation.confirm_config import PairTestConfig
from ingero.remediation.pair_tests import PairTestRecord, name_job
from ingero.remediation.slurm_states import is_in_service
from ingero.units import NS_PER_S

PRINTED_MAX: Final = 4000
"""Bytes of what a test prints that are kept, the last ones."""
_SCRIPT: Final = """\
#!/bin/sh
export INGERO_PAIR_SUSPECT={suspect} INGERO_PAIR_PEER={peer} INGERO_PAIR_ROUNDS={rounds}
program={program}
said=$({command} 2>&1 | tail -c {limit} | tr '[:space:]' '~')
exec scontrol update JobId="$SLURM_JOB_ID" Comment="$said"
"""
_OWN: Final = 'python3 -c "$program" coordinate "$program" "$SLURMD_NODENAME" "$INGERO_PAIR_ROUNDS"'
_STATE: Final = re.compile(r"\sJobState=(\S+)")
_REASON: Final = re.compile(r"\sReason=(\S+)")
_COMMENT: Final = re.compile(r"\sComment=(\S*)")
_WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})  # fmt: skip
_CALM: Final = ("idle", "mixed", "allocated")
"""Peers with free processors come first."""


class SlurmPairActuator(SlurmActuator):
    """Slurm through its commands, with pair tests.

    Args:
        config: How.
        test: Which job.
    """

    def __init__(self, config: SlurmConfig, test: PairTestConfig) -> None:
        super().__init__(config)
        self._test = test

    def find_peer(self, suspect: str, avoid: Collection[str]) -> tuple[str, str]:
        """One of a partition of the suspect's, with as many processors, the same GRES and features; idle ones first."""
        wanted = ("-p", self._test.partition) if self._test.partition else ()
        text = self._ask("sinfo", "-h", "-N", "-o", "%N|%R|%T|%c|%G|%f", *wanted)
        rows = [line.split("|", 5) for line in text.splitlines() if line.count("|") >= 5]
        kinds = {(row[1], *row[3:]) for row in rows if row[0] == suspect}
        fitting = [
            (_CALM.index(state), name, partition)
            for name, partition, shown, *kind in rows
            if (partition, *kind) in kinds and name not in {suspect, *avoid}
            if is_in_service(shown.upper()) and (state := shown.rstrip("*~#!%$@^-")) in _CALM
        ]
        _, name, partition = min(fitting, default=(0, "", ""))
        return name, partition

    def submit_test(self, record: PairTestRecord) -> str:
        """By ``sbatch``, its script on standard input."""
        options = (
            "--parsable", f"--job-name={name_job(record)}", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
            f"--nodelist={record.suspect},{record.peer}", f"--partition={record.partition}",
            f"--time={_write_time(self._test.time_limit)}",
            f"--deadline=now+{_seconds(self._test.max_wait + self._test.time_limit) + 60}",
            "--no-requeue", "--export=PATH", "--chdir=/", "--output=/dev/null",
        )  # fmt: skip
        printed = self._run("sbatch", *options, *self._test.options, text=self.write_script(record))
        return printed.partition(";")[0].strip()

    def write_script(self, record: PairTestRecord) -> str:
        """What the job runs."""
        program = Path(pair_program.__file__).read_text(encoding="utf-8")
        command = shlex.join(self._test.command)
        return _SCRIPT.format(
            suspect=shlex.quote(record.suspect),
            peer=shlex.quote(record.peer),
            rounds=self._test.rounds,
            program="" if command else shlex.quote(program),
            command=command or _OWN,
            limit=PRINTED_MAX,
        )

    def read_test(self, record: PairTestRecord) -> PairJob:
        """By ``scontrol show job``."""
        job = record.job or self._find_job(record)
        if not job:
            return PairJob(PairJobState.UNKNOWN)
        try:
            shown = self._run("scontrol", "-o", "show", "job", job)
        except PermanentError:
            return PairJob(PairJobState.UNKNOWN, job)
        return read_job(job, shown)

    def _find_job(self, record: PairTestRecord) -> str:
        lines = self._ask("squeue", "-h", "-n", name_job(record), "-t", "all", "-o", "%A").split()
        return lines[0] if lines else ""

    def cancel_test(self, record: PairTestRecord) -> None:
        """By name, so that a job whose id was never learnt ends too."""
        self._ask("scancel", f"--name={name_job(record)}")

    def _ask(self, program: str, *arguments: str) -> str:
        """Where a refusal is no answer either."""
        try:
            return self._run(program, *arguments)
        except PermanentError as error:
            raise RetryableError(f"Slurm does not answer: {error.message}") from error


def read_job(job: str, shown: str) -> PairJob:
    """A job of ``scontrol -o show job``."""
    state, reason, comment = (_find(pattern, shown) for pattern in (_STATE, _REASON, _COMMENT))
    if state in _WAITING:
        return PairJob(PairJobState.WAITING, job, reason)
    if state in _RUNNING:
        return PairJob(PairJobState.RUNNING, job)
    if state == "COMPLETED":
        return PairJob(PairJobState.FINISHED, job, comment)
    return PairJob(PairJobState.FAILED, job, f"{state or 'it has no state'}, {reason}")


def _find(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _seconds(duration_ns: int) -> int:
    return -(-duration_ns // NS_PER_S)


def _write_time(duration_ns: int) -> str:
    minutes, seconds = divmod(_seconds(duration_ns), 60)
    return f"{minutes}:{seconds:02}"
