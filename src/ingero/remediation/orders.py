"""Answers to a node's HealthCheckProgram. Pure.

The node decides nothing: an order to drain itself is an action that stands in the journal, and is given only while
the policy would still let that action, judged anew at every poll.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ingero.remediation.actuators.actuator import describe_worker, write_reason
from ingero.remediation.actuators.slurm import REASON_MAX
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.policy import Ruling, Situation, still_lets
from ingero.remediation.records import ActionRecord, ActionState, Moment


class OrderVerb(StrEnum):
    """The first word of an answer."""

    NONE = "none"
    """Nothing is held against the node."""
    REPORT = "report"
    """Say the rest, and do nothing."""
    DRAIN = "drain"
    """Drain the node with the rest as the reason."""
    UNDRAIN = "undrain"
    """Take the drain away, if its reason names the action that follows."""


@dataclass(frozen=True, slots=True)
class NodeOrders:
    """Answers to all nodes, until the next poll.

    Attributes:
        at: When it was decided.
        lines: The answer to each node, by the scheduler's name of it.
        nodes: The nodes that the scheduler knows; None while it does not answer.
    """

    at: Moment
    lines: Mapping[str, str]
    nodes: frozenset[str] | None


def build_orders(
    config: RemediatorConfig,
    rulings: Sequence[Ruling],
    situation: Situation,
    records: Sequence[ActionRecord],
) -> NodeOrders:
    """The answer to each node.

    Args:
        config: The policy.
        rulings: What it says of each finding now.
        situation: What is known.
        records: Every action of the journal, as the poll has left it.
    """
    lines = {}
    for ruling in rulings:
        if ruling.is_allowed and config.mode != "auto":
            lines[ruling.target] = (
                f"{OrderVerb.REPORT} would be drained: {ruling.finding.description}"
            )
    views = situation.nodes or {}
    findings = {one.finding.episode: one.finding for one in rulings}
    for record in records:
        view = views.get(record.target)
        only_asked = situation.is_stopped or config.mode == "dry-run"
        for verb, description in _iter_orders(config, record, view, only_asked=only_asked):
            if verb is OrderVerb.DRAIN and not still_lets(config, record, findings, situation):
                continue
            lines[record.target] = f"{verb} {description}"
    names = None if situation.nodes is None else frozenset(situation.nodes)
    return NodeOrders(situation.now, lines, names)


def _iter_orders(
    config: RemediatorConfig, record: ActionRecord, view: NodeView | None, *, only_asked: bool
) -> Iterator[tuple[OrderVerb, str]]:
    """What one action asks of its node, were it alone.

    Args:
        config: The policy.
        record: The action.
        view: The node, as the scheduler shows it.
        only_asked: Nothing is to be done but what a person asked back.
    """
    if view is None or record.kind != config.action.kind:
        return
    slurm = config.action.slurm
    drains_itself = slurm is not None and slurm.drained_by == "health-check"
    is_ours = view.mark == record.action_id
    if is_ours and record.state is ActionState.UNDOING and drains_itself:
        if record.is_asked_back or not only_asked:
            yield OrderVerb.UNDRAIN, record.action_id
    elif is_ours:
        yield OrderVerb.REPORT, f"out of service: {view.reason}"
    elif record.state is ActionState.BEGUN and drains_itself and view.in_service:
        if not only_asked:
            yield OrderVerb.DRAIN, write_reason(record, describe_worker(record), REASON_MAX)
    elif record.state is ActionState.PROPOSED:
        yield OrderVerb.REPORT, f"{record.action_id} waits for approval: {describe_worker(record)}"


def find_order(orders: NodeOrders | None, node: str, now: Moment, max_age_ns: int) -> str:
    """The answer to a node; no order of a poll that is too old."""
    if orders is None or now.since(orders.at) > max_age_ns:
        return f"{OrderVerb.REPORT} the remediator has not polled lately"
    if orders.nodes is not None and node not in orders.nodes:
        return f"{OrderVerb.REPORT} the scheduler has no node {node}"
    return orders.lines.get(node, OrderVerb.NONE)
