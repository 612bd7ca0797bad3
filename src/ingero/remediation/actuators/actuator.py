"""What a remediator needs of whatever takes nodes out of service."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from ingero.model.collectives import Rank
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord

SETTINGS: Final = "settings"
"""Key of an action's evidence: with which settings of the actuator it was begun."""
NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})
_MARK: Final = re.compile(r"^ingero (a[0-9a-f]{10})\b")


def write_reason(record: ActionRecord, message: str, limit: int) -> str:
    """What the scheduler is to show: the action, its finding, and why; in printable ASCII, on one line."""
    text = f"ingero {record.action_id} {record.episode}: {message}"
    plain = text.replace("×", "x").encode("ascii", "replace").decode()
    return "".join(one if one.isprintable() else " " for one in plain)[:limit]


def find_mark(reason: str) -> str:
    """The action that a reason names; empty when it is not one of ours."""
    found = _MARK.match(reason)
    return found[1] if found else ""


def describe_worker(record: ActionRecord) -> str:
    """What a finding holds against which rank, for a scheduler's reason."""
    evidence = record.evidence
    rank = evidence.get("rank")
    worker = f"rank {rank}" if isinstance(rank, int) and rank >= 0 else "node"
    return f"{evidence.get('verdict', '')} {worker}: {evidence.get('reason', '')}"


def find_name(
    node_id: str,
    names: Container[str],
    of_hosts: Mapping[str, Collection[str]],
    renamed: Mapping[str, str],
) -> str:
    """The scheduler's name of a node: as the policy has it, else its own or its host's, else that of its first label.

    Args:
        node_id: As Fleet has it.
        names: Those that the scheduler knows.
        of_hosts: The scheduler's names by name of a host, from `index_hosts`.
        renamed: The scheduler's name by Fleet's, as the policy has it.

    Returns:
        Empty when there is none, or several hosts have it.
    """
    given = renamed.get(node_id)
    if given is not None:
        return given if given in names else ""
    for wanted in dict.fromkeys((node_id, node_id.partition(".")[0])):
        if wanted in names:
            return wanted
        of_host = of_hosts.get(wanted, ())
        if len(of_host) == 1:
            return next(iter(of_host))
    return ""


def index_hosts(hosts: Iterable[tuple[str, Iterable[str]]]) -> dict[str, set[str]]:
    """The scheduler's names by name of a host.

    Args:
        hosts: The scheduler's names, each with those of its host.
    """
    found: dict[str, set[str]] = {}
    for name, of in hosts:
        for host in of:
            found.setdefault(host, set()).add(name)
    return found


class Actuator(Protocol):
    """One scheduler.

    Attributes:
        kind: As the journal has it.
        can_read_nodes: Whether `read_nodes` knows anything. What cannot be read is taken as done when it said so.
        settings: Those of the policy that an action must be reversed with, too; kept with it under `SETTINGS`.
    """

    kind: str
    can_read_nodes: bool
    settings: Mapping[str, str]

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Every node by the scheduler's name.

        Raises:
            RetryableError: The scheduler does not answer.
        """
        ...

    def find_target(self, rank: Rank, nodes: Mapping[str, NodeView]) -> str:
        """The scheduler's name of what is to be taken out of service for a rank, its node by most actuators.

        Called for every rank that Fleet has judged, so it asks nobody.

        Returns:
            Empty when there is none, or several fit.
        """
        ...

    def watch(self, targets: Iterable[str]) -> None:
        """Have the next looks at nodes tell these as they are then, where those of others may be older."""
        ...

    def apply(self, record: ActionRecord) -> None:
        """Take the target out of service. Asked again with the same record, it changes nothing more.

        Raises:
            RetryableError: Whether it took effect is not known.
            PermanentError: It was refused.
        """
        ...

    def rehearse(self, record: ActionRecord) -> None:
        """Ask what `apply` would ask where that can be asked without changing anything; else do nothing.

        Raises:
            RetryableError: It is not known whether it would be taken.
            PermanentError: It would be refused.
        """
        ...

    def reverse(self, record: ActionRecord) -> None:
        """Give the target back.

        Raises:
            RetryableError: Whether it took effect is not known.
            PermanentError: It was refused.
        """
        ...

    def find_jobs(self, record: ActionRecord) -> Mapping[str, int] | None:
        """Jobs on the target that are to be started again elsewhere, with the number of their restarts.

        None when jobs are to be left alone.

        Raises:
            RetryableError: The scheduler does not answer.
        """
        ...

    def requeue(self, job: str) -> None:
        """Start a job again elsewhere.

        Raises:
            RetryableError: Whether it took effect is not known.
            PermanentError: It was refused.
        """
        ...
