"""Slurm: drain with a reason, undrain, requeue, through its own commands.

Seen with Slurm 22.05: UNDRAIN takes the drain and its reason away and leaves DOWN as it is; a drain of a node that is
DOWN would overwrite the reason somebody gave, so only nodes in service are drained. Slurm takes an update whatever the
node is by then: each is looked at right before it is changed.
Source: scontrol(1), squeue(1).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ingero.config.environment import build_environment
from ingero.errors import BadDataError, PermanentError, RetryableError, UnsupportedError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import (
    NO_SETTINGS,
    describe_worker,
    find_mark,
    find_name,
    index_hosts,
    write_reason,
)
from ingero.remediation.config import SlurmConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord
from ingero.remediation.slurm_states import REASON, STATE, is_in_service
from ingero.units import NS_PER_S

REASON_MAX: Final = 200
_NODE: Final = re.compile(r"^NodeName=(\S+)")
_HOST: Final = re.compile(r"\sNodeHostName=(\S+)")
_REFUSED: Final = re.compile(
    r"invalid|denied|not permitted|unknown|only batch jobs|presently disabled|^Node \S+ not found",
    re.IGNORECASE,
)
_NO_SERVER: Final = re.compile(
    r"unable to contact|timed out|connection|munge|communication", re.IGNORECASE
)


def parse_nodes(text: str) -> dict[str, tuple[NodeView, str]]:
    """Each node with its host's name, from ``scontrol -o show node``.

    Raises:
        BadDataError: A line has no name or no state.
    """
    found = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, state = _NODE.search(line), STATE.search(line)
        if name is None or state is None:
            raise BadDataError(f"not a node of scontrol: {line[:80]!r}")
        host, reason = _HOST.search(line), REASON.search(line)
        why = reason[1] if reason else ""
        view = NodeView(name[1], is_in_service(state[1]), state[1], find_mark(why), why)
        is_drained = "DRAIN" in state[1]
        if not is_drained:  # a reason outlives its drain on a node that is DOWN
            view = NodeView(view.name, view.in_service, view.state, "", why)
        found[name[1]] = (view, host[1] if host else "")
    return found


class SlurmActuator:
    """Slurm through its commands.

    Args:
        config: How.
    """

    kind = "slurm"
    can_read_nodes = True
    settings = NO_SETTINGS

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config
        self._of_hosts: dict[str, set[str]] = {}

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Every node of the cluster."""
        try:
            found = parse_nodes(self._run("scontrol", "-o", "show", "node"))
        except (BadDataError, PermanentError) as error:
            raise RetryableError(f"Slurm does not tell its nodes: {error}") from error
        self._of_hosts = index_hosts((name, (host,)) for name, (_, host) in found.items() if host)
        return {name: view for name, (view, _) in found.items()}

    def find_target(self, rank: Rank, nodes: Mapping[str, NodeView]) -> str:
        """By the table of the policy, else a NodeName or NodeHostName that is the node's name or its first label."""
        return find_name(rank.node_id, nodes, self._of_hosts, self._config.node_names)

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: each look asks for every node."""

    def apply(self, record: ActionRecord) -> None:
        """Drain it. Running jobs go on, no new ones start. Nothing where its health check does that."""
        if self._config.drained_by != "remediator":
            return
        view = self._read_node(record.target)
        if view.mark == record.action_id:
            return
        if not view.in_service:
            raise PermanentError(f"{view.name} is out of service already: {view.state}")
        reason = write_reason(record, describe_worker(record), REASON_MAX)
        self._update(record.target, "state=drain", f"reason={reason}")

    def rehearse(self, _record: ActionRecord) -> None:
        """Nothing: Slurm has no dry run."""

    def reverse(self, record: ActionRecord) -> None:
        """Take the drain away while it is the action's own. Nothing where its health check does that."""
        if self._config.drained_by != "remediator":
            return
        if self._read_node(record.target).mark == record.action_id:
            self._update(record.target, "state=undrain")

    def _read_node(self, name: str) -> NodeView:
        """One node as it is now.

        Raises:
            RetryableError: Slurm does not answer, or with something else.
            PermanentError: It has no such node.
        """
        try:
            return parse_nodes(self._run("scontrol", "-o", "show", "node", name))[name][0]
        except (BadDataError, KeyError) as error:
            raise RetryableError(f"Slurm does not tell node {name}: {error}") from error

    def _update(self, target: str, *what: str) -> None:
        self._run("scontrol", "update", f"nodename={target}", *what)

    def find_jobs(self, record: ActionRecord) -> Mapping[str, int] | None:
        """Batch jobs on the node that may be requeued; None when the policy leaves jobs alone."""
        if not self._config.requeue:
            return None
        fields = "JobArrayID:|,RestartCnt:|,Requeue:|,BatchFlag:|"
        try:
            text = self._run("squeue", "-h", "-t", "R", "-w", record.target, "-O", fields)
        except PermanentError as error:
            raise RetryableError(f"Slurm does not tell its jobs: {error}") from error
        rows = [line.split("|") for line in text.splitlines() if line.strip()]
        # Slurm requeues batch jobs only, and says "may be requeued" of every allocation.
        return {
            job.strip(): int(restarts)
            for job, restarts, may_be, is_batch, *_ in rows
            if may_be.strip() == is_batch.strip() == "1"
        }

    def requeue(self, job: str) -> None:
        """Put the job back into the queue."""
        self._run("scontrol", "requeue", job)

    def _run(self, program: str, *arguments: str, text: str = "") -> str:
        """What a command prints, given ``text`` on its standard input."""
        command: Sequence[str] = (
            str(Path(self._config.bin_dir) / program) if self._config.bin_dir else program,
            *arguments,
        )
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                input=text,
                timeout=self._config.timeout / NS_PER_S,
                env=build_environment({"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}),
            )
        except subprocess.TimeoutExpired as error:
            raise RetryableError(f"{program} did not end in time") from error
        except FileNotFoundError as error:
            raise UnsupportedError(
                f"there is no {command[0]}", hint="install Slurm's client, or set slurm.bin_dir"
            ) from error
        except OSError as error:
            raise RetryableError(f"{program} could not be started: {error}") from error
        if done.returncode == 0:
            return done.stdout
        output = " ".join((done.stderr or done.stdout).split())[:200]
        if _REFUSED.search(output) and not _NO_SERVER.search(output):
            raise PermanentError(f"{program} refused: {output}")
        raise RetryableError(f"{program} failed with {done.returncode}: {output}")
