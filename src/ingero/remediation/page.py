"""What the remediator did, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ingero.remediation.audit import AuditCounts
from ingero.remediation.journal import Journal
from ingero.remediation.messages import MessageCounts
from ingero.remediation.pair_tests import ALIVE, PairOutcome
from ingero.remediation.records import ActionState
from ingero.remediation.remediator import RemediatorCounts

_COUNTERS: Final = (
    ("polls_total", "n_polls", "Polls of Fleet and the scheduler."),
    ("fleet_away_total", "n_fleet_away", "Looks at which Fleet did not answer."),
    ("scheduler_away_total", "n_scheduler_away", "Looks at which the scheduler did not answer."),
    ("clock_jumps_total", "n_clock_jumps", "Jumps of the wall clock."),
)

_AUDIT: Final = (
    ("audit_sent_total", "n_sent", "Entries of the journal that Echo took."),
    ("audit_failures_total", "n_failures", "Requests that Echo did not take; they come again."),
    ("audit_rejected_total", "n_rejected", "Entries that Echo refused; they are in the journal."),
)


_MESSAGES: Final = (
    ("messages_sent_total", "n_sent", "Messages with a proposal's link that their receiver took."),
    ("messages_failures_total", "n_failures", "Tries of messages that failed; they come again."),
    ("messages_refused_total", "n_refused", "Messages that their receiver refused."),
)


class RemediatorPage:
    """The pages of a remediator. Asked in other threads.

    Args:
        counts: What it did since its start.
        journal: Its journal, which is opened for each request.
        audit: What became of the audit; None without one.
        find_order: The answer to a node of the scheduler's.
        messages: What became of messages to people; None without any.
    """

    def __init__(
        self,
        counts: RemediatorCounts,
        journal: Path,
        audit: AuditCounts | None = None,
        find_order: Callable[[str], str] | None = None,
        messages: MessageCounts | None = None,
    ) -> None:
        self._counts = counts
        self._journal = journal
        self._audit = audit
        self._find_order = find_order
        self._messages = messages

    def find_page(self, path: str) -> str | None:
        """``/node/NAME``: the answer to a node that asks."""
        _, is_node, node = path.partition("/node/")
        if not is_node or not node or self._find_order is None:
            return None
        return f"{self._find_order(node)}\n"

    def render(self) -> str:
        """The metrics, text format 0.0.4."""
        with Journal(self._journal, read_only=True) as journal:
            by_state = Counter(record.state for record in journal.actions())
            n_waiting = journal.count_waiting()
            n_tests = sum(one.state in ALIVE for one in journal.pair_tests.read())
        lines = []
        for name, field, description in _COUNTERS:
            lines += _family(name, "counter", description, [("", getattr(self._counts, field))])
        changes = [
            (f'{{state="{state}"}}', self._counts.n_by_state.get(state, 0)) for state in ActionState
        ]
        lines += _family("changes_total", "counter", "Changes of actions into a state.", changes)
        actions = [(f'{{state="{state}"}}', by_state[state]) for state in ActionState]
        lines += _family("actions", "gauge", "Actions of the journal by state.", actions)
        tests = [
            (f'{{outcome="{outcome}"}}', self._counts.n_tests.get(outcome, 0))
            for outcome in PairOutcome
        ]
        lines += _family("pair_tests_total", "counter", "Pair tests that ended.", tests)
        description = "Pair tests that the scheduler has or may have."
        lines += _family("pair_tests_alive", "gauge", description, [("", n_tests)])
        if self._audit is not None:
            for name, field, description in _AUDIT:
                lines += _family(name, "counter", description, [("", getattr(self._audit, field))])
            description = "Entries of the journal that Echo has not taken yet."
            lines += _family("audit_waiting", "gauge", description, [("", n_waiting)])
        if self._messages is not None:
            for name, field, description in _MESSAGES:
                lines += _family(
                    name, "counter", description, [("", getattr(self._messages, field))]
                )
        return "\n".join(lines) + "\n"

    def readiness(self, _window_ns: int) -> tuple[bool, str]:
        """Ready after the first poll."""
        is_ready = self._counts.n_polls > 0
        return is_ready, "ready" if is_ready else "not ready: has not polled yet"


def _family(name: str, kind: str, description: str, points: Iterable[tuple[str, int]]) -> list[str]:
    full = f"ingero_remediator_{name}"
    return [
        f"# HELP {full} {description}",
        f"# TYPE {full} {kind}",
        *(f"{full}{labels} {count}" for labels, count in points),
    ]
