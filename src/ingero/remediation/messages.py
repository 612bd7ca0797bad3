"""Tells people of proposals that wait for them: a message with the link of each, to Slack or to a signed webhook.

Runs on a thread and reads the journal, so a receiver that is away holds up nothing. Nothing is stored: a proposal that
waits is sent until it was taken once, and once more after a restart. Links go where the policy says and nowhere else.

Lossy: what a receiver refuses permanently is not sent again and counted in `MessageCounts.n_refused`; a proposal that
is answered or over before its receiver came back is not sent any more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any, Final, NamedTuple, Protocol

from ingero.errors import ConfigError, PermanentError, RetryableError, StoreError
from ingero.remediation.actuators.command import describe_action
from ingero.remediation.approval_config import LinkReceiverConfig, SlackReceiverConfig
from ingero.remediation.approval_html import describe_effect
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.journal import Journal
from ingero.remediation.links import LinkSigner
from ingero.remediation.records import ActionRecord
from ingero.remediation.secret_file import read_secret, read_secret_text
from ingero.remediation.signed_posts import build_signed_headers, post_json
from ingero.remediation.webhook_config import SignedWebhookConfig
from ingero.slack_text import escape_slack_text
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S

_EVENT: Final = "proposal"
_FIRST_DELAY_NS: Final = NS_PER_S
_MAX_DELAY_NS: Final = 60 * NS_PER_S
_SLACK_OPTION: Final = "approval.link.send.slack.webhook_url_file"
_LOG: Final = logging.getLogger("ingero.remediation")


@dataclass(slots=True)
class MessageCounts:
    """Messages since the start.

    Attributes:
        n_sent: Taken by their receivers.
        n_failures: Tries that failed; they are made again.
        n_refused: Refused, so that people do not know.
    """

    n_sent: int = 0
    n_failures: int = 0
    n_refused: int = 0


class Proposal(NamedTuple):
    """What a message tells.

    Attributes:
        record: The action.
        effect: What it does, in a sentence.
        label: Whose link it is.
        link: The link.
        until_ns: Until when it holds, since the epoch.
    """

    record: ActionRecord
    effect: str
    label: str
    link: str
    until_ns: int


class Receiver(Protocol):
    """Where messages go."""

    def send(self, proposal: Proposal) -> None:
        """Send one.

        Raises:
            RetryableError: It may be taken later.
            PermanentError: It is refused.
        """
        ...


class SlackReceiver:
    """A channel, by an incoming webhook whose address is the secret; it is read again for each message.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, config: SlackReceiverConfig) -> None:
        self._file = config.webhook_url_file
        self._timeout_s = config.timeout / NS_PER_S
        read_secret_text(self._file, _SLACK_OPTION)

    def send(self, proposal: Proposal) -> None:
        """See `Receiver`."""
        try:
            url = read_secret_text(self._file, _SLACK_OPTION)
        except ConfigError as error:
            raise RetryableError(error.message) from error
        post_json(url, json.dumps({"text": write_text(proposal)}).encode(), {}, self._timeout_s)


class WebhookReceiver:
    """A receiver of signed requests.

    Raises:
        ConfigError: The secret cannot be used.
    """

    def __init__(self, config: SignedWebhookConfig, clock: Clock) -> None:
        self._config = config
        self._secret = read_secret(config.secret_file, "approval.link.send.webhook.secret_file")
        self._clock = clock

    def send(self, proposal: Proposal) -> None:
        """See `Receiver`."""
        record = proposal.record
        body = json.dumps(_describe(proposal)).encode()
        message_id = f"{record.action_id}-{_EVENT}-{proposal.label}"
        wall_s = self._clock.wall_ns() // NS_PER_S
        headers = build_signed_headers(self._secret, message_id, wall_s, body)
        post_json(self._config.url, body, headers, self._config.timeout / NS_PER_S)


def _describe(proposal: Proposal) -> dict[str, Any]:
    return {
        **describe_action(proposal.record, _EVENT),
        "effect": proposal.effect,
        "label": proposal.label,
        "link": proposal.link,
        "until_unix_s": proposal.until_ns // NS_PER_S,
    }


def write_text(proposal: Proposal) -> str:
    """The message as people read it, with what Slack would take for markup escaped."""
    record, until_ns = proposal.record, proposal.until_ns
    until = datetime.fromtimestamp(until_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M UTC")
    node = "" if record.node_id == record.target else f" ({record.node_id})"
    evidence = record.evidence
    lines = (
        f"Take {record.target}{node} of {record.cluster_id} out of service?",
        f"{evidence.get('verdict', '')}: {evidence.get('reason', '')}",
        proposal.effect,
        f"Approve or reject until {until}: {proposal.link}",
    )
    return escape_slack_text("\n".join(lines))


class _Queue:
    """One receiver, and what it has taken.

    Args:
        label: Whose links it gets.
        receiver: The receiver.
    """

    def __init__(self, label: str, receiver: Receiver) -> None:
        self.label = label
        self.receiver = receiver
        self.is_over: set[str] = set()
        self._delay_ns = 0
        self._next_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether it may be tried."""
        return now_ns >= self._next_ns

    def note(self, now_ns: int, *, is_taken: bool) -> None:
        """A try has ended."""
        self._delay_ns = (
            0 if is_taken else min(max(2 * self._delay_ns, _FIRST_DELAY_NS), _MAX_DELAY_NS)
        )
        self._next_ns = now_ns + self._delay_ns


class ProposalSender:
    """Sends proposals that wait.

    Args:
        config: The policy.
        signer: Makes links.
        clock: Time.

    Attributes:
        counts: What became of messages.

    Raises:
        ConfigError: A secret cannot be used.
    """

    def __init__(self, config: RemediatorConfig, signer: LinkSigner, clock: Clock) -> None:
        self.counts = MessageCounts()
        self._config = config
        self._signer = signer
        self._clock = clock
        self._log = RateLimitedLog(_LOG, clock)
        link = config.approval.link
        self._queues = [
            _Queue(one.label, _build_receiver(one, clock)) for one in (link.send if link else ())
        ]

    def run(self, path: Path, stop: Event) -> None:
        """Send until it is stopped.

        Args:
            path: The journal's file.
            stop: Set from outside.
        """
        while not stop.wait(self._config.fleet.poll_interval / NS_PER_S):
            try:
                with Journal(path, read_only=True) as journal:
                    self.send_waiting(journal.actions())
            except StoreError as error:
                self.counts.n_failures += 1
                self._log.write(
                    "journal", logging.ERROR, "proposals cannot be read", error=error.message
                )
            self._log.flush()

    def send_waiting(self, actions: Sequence[ActionRecord]) -> None:
        """Send each proposal that waits to each receiver that has not taken it."""
        links = {one.action_id: (one, self._signer.build_links(one)) for one in actions}
        links = {name: (one, found) for name, (one, found) in links.items() if found}
        for queue in self._queues:
            queue.is_over &= links.keys()
            for record, found in links.values():
                if record.action_id in queue.is_over or not queue.is_due(self._clock.mono_ns()):
                    continue
                self._send(queue, self._build(record, queue.label, found))

    def _build(self, record: ActionRecord, label: str, links: Mapping[str, str]) -> Proposal:
        effect = describe_effect(self._config.action, record.target)
        until_ns = record.changed.wall_ns + self._config.approval.expires
        return Proposal(record, effect, label, links[label], until_ns)

    def _send(self, queue: _Queue, proposal: Proposal) -> None:
        where = f"{proposal.record.action_id} to {proposal.label}"
        try:
            queue.receiver.send(proposal)
        except RetryableError as error:
            self.counts.n_failures += 1
            queue.note(self._clock.mono_ns(), is_taken=False)
            self._log.write(
                ("failed", proposal.label), logging.WARNING, "a proposal was not sent; it is tried again",
                proposal=where, error=error.message,
            )  # fmt: skip
            return
        except PermanentError as error:
            self.counts.n_refused += 1
            _LOG.error("proposal %s was refused: %s", where, error.message)
        else:
            self.counts.n_sent += 1
            _LOG.info("proposal %s was sent", where)
        queue.is_over.add(proposal.record.action_id)
        queue.note(self._clock.mono_ns(), is_taken=True)


def _build_receiver(config: LinkReceiverConfig, clock: Clock) -> Receiver:
    if config.slack is not None:
        return SlackReceiver(config.slack)
    assert config.webhook is not None
    return WebhookReceiver(config.webhook, clock)
