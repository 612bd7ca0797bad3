"""The journal's entries, sent to Echo as log records: in their order, and none left out.

Runs on a thread with a connection of its own, so an Echo that is away holds up no action: entries wait in the journal,
where they were written together with what they tell of. One whose answer was lost is sent again, and is one row in Echo
all the same, because its number, time and content are.

Lossy: what Echo refuses of a request that it takes is counted in `AuditCounts.n_rejected`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from ingero.closing import Closing
from ingero.config.tls import TlsClientConfig
from ingero.errors import BadDataError, IngeroError, StoreError
from ingero.header_values import read_bearer
from ingero.otlp.client.http import HttpSender, HttpSenderSettings
from ingero.otlp.client.reply import SendReply
from ingero.otlp.codec import encode_protobuf
from ingero.otlp.names import SIGNAL_PATHS, ContentType
from ingero.remediation.config import AuditConfig
from ingero.remediation.journal import Journal, JournalEntry
from ingero.serving.tls import build_client_context
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.remediation import (
    ACTION_ENTRY,
    DECISION_ENTRY,
    RemediationEntry,
    build_remediation_records,
)

_AT_ONCE: Final = 200
_LOG: Final = logging.getLogger("ingero.remediation")


@dataclass(slots=True)
class AuditCounts:
    """What has become of entries since the start.

    Attributes:
        n_sent: Taken by Echo.
        n_failures: Requests that Echo did not take; their entries are sent again.
        n_rejected: Entries that it refused while it took others; they are only in the journal.
    """

    n_sent: int = 0
    n_failures: int = 0
    n_rejected: int = 0


class AuditSender(Closing):
    """Sends what waits.

    Args:
        config: Where Echo is.
        journal: The journal's file.
        clock: Time.

    Attributes:
        counts: What has become of entries.

    Raises:
        IngeroError: A certificate file cannot be used.
    """

    def __init__(self, config: AuditConfig, journal: Path, clock: Clock) -> None:
        self.counts = AuditCounts()
        self._config = config
        self._path = journal
        self._clock = clock
        self._log = RateLimitedLog(_LOG, clock)
        tls = None
        if config.endpoint.startswith("https://"):
            tls = build_client_context(TlsClientConfig(ca_file=config.ca_file))
        self._sender = HttpSender(
            HttpSenderSettings(
                urls=lambda signal: f"{config.endpoint}{SIGNAL_PATHS[signal]}",
                encode=encode_protobuf,
                content_type=ContentType.PROTOBUF,
                timeout_ns=config.timeout,
                headers=self.make_headers,
                tls=tls,
                user_agent="ingero-remediator",
                max_connections=1,
            )
        )

    def run(self, stop: Event) -> None:
        """Send until it is stopped, and then once more."""
        try:
            while not self._send_until(stop):
                stop.wait(self._config.interval / NS_PER_S)
        finally:
            self.close()

    def _send_until(self, stop: Event) -> bool:
        """Whether it came to the end; otherwise the journal cannot be read now."""
        is_last = stop.is_set()
        try:
            with Journal(self._path) as journal:
                while True:
                    is_last = stop.is_set()
                    self.send_waiting(journal)
                    if is_last:
                        return True
                    stop.wait(self._config.interval / NS_PER_S)
        except StoreError as error:
            self.counts.n_failures += 1
            self._log.write(
                "journal",
                logging.ERROR,
                "the audit cannot read the journal; it goes on when it can",
                error=error.message,
            )
        return is_last

    def close(self) -> None:
        """Close its connection."""
        self._sender.close()

    def send_waiting(self, journal: Journal) -> None:
        """Send all that waits, oldest first, as far as Echo takes it. Raises StoreError as the journal does."""
        while entries := journal.waiting_entries(_AT_ONCE):
            if not self._send(entries):
                return
            journal.forget_entries(entries[-1].seq)

    def _send(self, entries: Sequence[JournalEntry]) -> bool:
        try:
            export = build_remediation_records(map(read_entry, entries))
            reply = self._sender.send(export, self._clock.wall_ns())
        except BadDataError as error:
            reply = SendReply(is_taken=False, code="", detail=error.message)
        if not reply.is_taken:
            self.counts.n_failures += 1
            self._log.write(
                "away",
                logging.WARNING,
                "Echo does not take the audit; it waits in the journal",
                endpoint=self._config.endpoint,
                error=reply.words,
            )
            return False
        self.counts.n_sent += len(entries) - reply.n_rejected
        if reply.n_rejected:
            self.counts.n_rejected += reply.n_rejected
            message = "Echo refused entries of the audit; they are only in the journal"
            self._log.write("refused", logging.WARNING, message, entries=reply.n_rejected)
        return True

    def make_headers(self) -> dict[str, str]:
        """The bearer as it is now. Raises BadDataError when it cannot be read."""
        file = self._config.bearer_file
        if not file:
            return {}
        try:
            return {"Authorization": f"Bearer {read_bearer(Path(file))}"}
        except BadDataError as error:
            raise BadDataError(f"audit.bearer_file: {error.message}") from error


def read_entry(entry: JournalEntry) -> RemediationEntry:
    """An entry of the journal as it is sent."""
    content = entry.content
    is_action = "state" in content
    return RemediationEntry(
        seq=entry.seq,
        wall_ns=entry.wall_ns,
        cluster_id=content["cluster_id"],
        node_id=content["node_id"],
        entry=ACTION_ENTRY if is_action else DECISION_ENTRY,
        episode=content["episode"],
        action_id=content["id"] if is_action else "",
        target=content["target"] if is_action else "",
        actuator=content["kind"] if is_action else "",
        state=content["state"] if is_action else "",
        note=content["note"] if is_action else content["decision"],
        evidence=json.dumps(content["evidence"], sort_keys=True),
        clauses=json.dumps(content["clauses"], sort_keys=True),
    )


def check_audit(config: AuditConfig | None, clock: Clock) -> None:
    """Read the files that it names. Raises IngeroError when one cannot be used."""
    if config is None:
        return
    with AuditSender(config, Path(), clock) as sender:
        try:
            sender.make_headers()
        except BadDataError as error:
            raise IngeroError(error.message) from error
