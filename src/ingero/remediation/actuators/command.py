"""A command of the site's own: one that takes a node out of service, and one that gives it back.

It gets the action as JSON on standard input and its main facts as environment variables. 0 is done; 75 (EX_TEMPFAIL of
sysexits.h) and a timeout mean that nobody knows, and it is asked again with the same id; anything else is a refusal.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ingero.config.environment import build_environment
from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import NO_SETTINGS, write_reason
from ingero.remediation.config import CommandConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord
from ingero.units import NS_PER_S

EX_TEMPFAIL: Final = 75
REASON_MAX: Final = 500


def describe_action(record: ActionRecord, event: str) -> dict[str, Any]:
    """What a command or a webhook is given: ``event`` is ``drain`` or ``undo``."""
    evidence = record.evidence
    description = f"{evidence.get('verdict', '')} on {record.node_id}: {evidence.get('reason', '')}"
    return {
        "event": event,
        "id": record.action_id,
        "episode": record.episode,
        "cluster_id": record.cluster_id,
        "node_id": record.node_id,
        "reason": write_reason(record, description, REASON_MAX),
        "evidence": dict(evidence),
        "clauses": [dict(clause) for clause in record.clauses],
    }


class CommandActuator:
    """Commands of a site.

    Args:
        config: Which.
    """

    kind = "command"
    can_read_nodes = False
    settings = NO_SETTINGS

    def __init__(self, config: CommandConfig) -> None:
        self._config = config

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Nothing: a command does not tell."""
        return {}

    def find_target(self, rank: Rank, _nodes: Mapping[str, NodeView]) -> str:
        """Fleet's name."""
        return rank.node_id

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: nobody can look."""

    def apply(self, record: ActionRecord) -> None:
        """Run the command that takes the node out of service."""
        self._run(self._config.drain, record, "drain")

    def rehearse(self, _record: ActionRecord) -> None:
        """Nothing: a command cannot be asked what it would do."""

    def reverse(self, record: ActionRecord) -> None:
        """Run the command that gives it back."""
        self._run(self._config.undo, record, "undo")

    def _run(self, command: Sequence[str], record: ActionRecord, event: str) -> None:
        action = describe_action(record, event)
        facts = ("event", "id", "episode", "cluster_id", "node_id", "reason")
        environ = {f"INGERO_ACTION_{fact.upper()}": str(action[fact]) for fact in facts}
        try:
            done = subprocess.run(
                command,
                input=json.dumps(action),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=self._config.timeout / NS_PER_S,
                env=build_environment(environ),
            )
        except subprocess.TimeoutExpired as error:
            raise RetryableError(f"{command[0]} did not end in time") from error
        except OSError as error:
            raise PermanentError(f"{command[0]} cannot be started: {error.strerror}") from error
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())[:200]
            problem = f"{command[0]} ended with {done.returncode}: {output}"
            is_unknown = done.returncode == EX_TEMPFAIL or done.returncode < 0
            raise RetryableError(problem) if is_unknown else PermanentError(problem)

    def find_jobs(self, _record: ActionRecord) -> None:
        """Jobs are the command's own business."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued by a command")
