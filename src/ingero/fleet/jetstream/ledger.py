"""What the judge of a cluster has reported, written down before each report leaves and confirmed after it.

A report that the pipelines do not take now is sent again until they do; until then it is not confirmed.

The document's revision is the fence: a judge that was replaced without noticing writes in vain, and sends nothing.
Between the write and the sending, the lease is the fence: another judge may open the ledger as soon as the lease has
run out, so a report leaves only where that is surely not so yet, and else is written down once more.
A report that was written down and not confirmed may not have left. So the records themselves are written down: the
next judge sends them as they are, with their time and their ids, and goes on from what they say. A receiver that has
them already knows them by their ids (`ingero.wire.record_uids`). Without the records, as in the ledger of an older
release and of a report above `MAX_WRITTEN_BYTES`, it goes on from what was said before them.

The document is smaller than the 1 MiB that NATS servers take by default. What does not fit, victims first and of alike
ones the oldest, this judge remembers for itself; lossy: the next one does not know of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from ingero.errors import BadDataError, RetryableError
from ingero.fleet.component import ReportSender
from ingero.fleet.jetstream.connection import NatsConnection, OvertakenError, StoredDocument
from ingero.fleet.jetstream.messages import (
    ClusterLedger,
    WrittenReport,
    decode_ledger,
    encode_document,
    read_report,
)
from ingero.model.verdicts import VerdictKind

LEDGER_KEY: Final = "ledger."
MAX_REPORTED_BYTES: Final = 640 << 10
"""Of what is reported in the document: 10 000 workers with names of usual length."""
MAX_PENDING_BYTES: Final = 256 << 10
"""Of what is not confirmed in the document, with its records; more reports wait for their turn."""
_MAX_EVICTED: Final = 65_536
_FRAME_BYTES: Final = 10
"""What the format adds to the two texts of an entry, at most."""
_RETRY_S: Final = 0.2
_log = logging.getLogger("ingero.fleet.nats")


def _find_bytes(about: str, state: str | None) -> int:
    return len(about.encode()) + len(state or "") + _FRAME_BYTES


@dataclass(frozen=True, slots=True)
class _Report:
    states: Mapping[str, str | None]
    send: Callable[[], bool]
    written: WrittenReport | None = None


class LedgerOfCluster:
    """One cluster's ledger, while this Fleet judges it.

    Args:
        connection: The way to the servers.
        token: The cluster's.
        is_leased: Whether no other Fleet can have opened the ledger yet, nor will before what is sent is confirmed.
        senders: Of reports that another judge has written down, by their names.

    Attributes:
        is_open: Cleared when another Fleet has taken over.
    """

    def __init__(
        self,
        connection: NatsConnection,
        token: str,
        is_leased: Callable[[], bool],
        senders: Mapping[str, ReportSender],
    ) -> None:
        self.is_open = True
        self._is_leased = is_leased
        self._senders = senders
        self._connection = connection
        self._key = LEDGER_KEY + token
        self._document = ClusterLedger()
        self._evicted: dict[str, str] = {}
        self._revision = 0
        self._waiting: deque[_Report] = deque()
        self._unsent: deque[_Report] = deque()
        self._has_changed = asyncio.Event()

    @property
    def passed_seq(self) -> int:
        """Pushes up to this one were passed on down the pipelines."""
        return self._document.passed_seq

    async def open(self) -> dict[str, str]:
        """Read what was reported, and make this Fleet the one that may report; raises RetryableError.

        What another judge has written down and not confirmed is sent by `run`, before anything else.

        Returns:
            What was reported last, by what it is about.

        Raises:
            OvertakenError: Another Fleet did so meanwhile.
        """
        stored: StoredDocument | None = await self._connection.read(
            self._connection.documents, self._key
        )
        if stored is not None:
            self._document = decode_ledger(stored.content)
            self._revision = stored.revision
        document = self._document
        reported = document.restore()
        self._take_over_unsent(reported)
        pending = {about for report in self._unsent for about in report.states}
        document.pending = {
            about: before for about, before in document.pending.items() if about in pending
        }
        document.written = [one.written for one in self._unsent if one.written is not None]
        document.reported = dict(reported)
        await self._write()
        return reported

    def _take_over_unsent(self, reported: dict[str, str]) -> None:
        """Send again what another judge has written down, and count it as reported."""
        for written in self._document.written:
            sender = self._senders.get(written.sender)
            try:
                export = read_report(written)
            except BadDataError as error:
                _log.error("a report of another Fleet is not sent again: %s", error.message)
                continue
            if sender is None:
                _log.error(
                    "a report of another Fleet is not sent again: no %s here", written.sender
                )
                continue
            states = {about: self._document.reported.get(about) for about in written.about}
            self._unsent.append(_Report(states, partial(sender.try_send, export), written))
            for about, state in states.items():
                if state is None:
                    reported.pop(about, None)
                else:
                    reported[about] = state
            self._has_changed.set()

    def note_passed(self, seq: int) -> None:
        """A push was passed on; written down with the next report or `settle`."""
        self._document.passed_seq = max(seq, self._document.passed_seq)
        self._has_changed.set()

    def report(
        self,
        reported: Mapping[str, str | None],
        send: Callable[[], bool],
        written: WrittenReport | None = None,
    ) -> None:
        """Have a report written down and sent. On the loop."""
        self._waiting.append(_Report(reported, send, written))
        self._has_changed.set()

    async def run(self, interval_s: float) -> None:
        """Write and send until another Fleet has taken over; at most one write in each interval but for reports."""
        while self.is_open:
            await self._has_changed.wait()
            self._has_changed.clear()
            await self.settle()
            if not self._waiting:
                await asyncio.sleep(interval_s)

    async def settle(self, *, is_last: bool = False) -> None:
        """Write down what waits, send it, and confirm that.

        Reports about the same thing go one after the other: each is known or new by what the one before it said, and
        another judge has to know which of them was sent last.

        Args:
            is_last: This Fleet ends: what the pipelines do not take at once stays unconfirmed for the next judge.
        """
        if not self._unsent and not self._waiting:
            await self._write_until_done()
        while self.is_open and (self._unsent or self._waiting):
            if not self._unsent:
                self._note_next()
            has_unsent = bool(self._unsent)
            if not await self._write_until_done():
                return
            if not await self._send_unsent(is_last=is_last):
                return
            if has_unsent:
                await self._write_until_done()

    async def _send_unsent(self, *, is_last: bool) -> bool:
        """Send what is written down, as soon as that may leave and is taken; False where some of it was not sent."""
        while self._unsent:
            if self._is_leased() and self._unsent[0].send():
                self._confirm(self._unsent.popleft())
                continue
            if is_last:
                await self._write_until_done()  # what was sent
                return False
            await asyncio.sleep(_RETRY_S)
            if not await self._write_until_done():  # what is passed on meanwhile
                return False
        return True

    def _confirm(self, report: _Report) -> None:
        for about in report.states:
            del self._document.pending[about]
        if report.written is not None:
            self._document.written.remove(report.written)

    def _note_next(self) -> None:
        """Note the reports that come first and are about different things as unsent, but for those that are known."""
        document, n_bytes = self._document, 0
        while self._waiting and document.pending.keys().isdisjoint(self._waiting[0].states):
            report = self._waiting[0]
            if self._is_known(report.states):
                self._waiting.popleft()
                continue
            n_bytes += self._find_pending_bytes(report)
            if n_bytes > MAX_PENDING_BYTES and self._unsent:
                break
            self._unsent.append(self._waiting.popleft())
            if report.written is not None:
                document.written.append(report.written)
            for about, state in report.states.items():
                before = self._find_reported(about)
                document.reported.pop(about, None)
                self._evicted.pop(about, None)
                document.pending[about] = before
                if state is not None:
                    document.reported[about] = state
        self._make_room()

    def _find_pending_bytes(self, report: _Report) -> int:
        n_bytes = sum(_find_bytes(about, self._find_reported(about)) for about in report.states)
        if report.written is None:
            return n_bytes
        written = report.written
        named = sum(_find_bytes(about, None) for about in (written.sender, *written.about))
        return n_bytes + named + len(written.content)

    def _find_reported(self, about: str) -> str | None:
        """What was said last; None for nothing, or that it is over."""
        return self._document.reported.get(about) or self._evicted.get(about)

    def _is_known(self, report: Mapping[str, str | None]) -> bool:
        """Whether it says nothing else than was said: by the judge before, of what this one learned again."""
        return all(self._find_reported(about) == state for about, state in report.items())

    def _make_room(self) -> None:
        """Take out of the document what does not fit, victims first: they begin and end with an alarm that stays."""
        reported = self._document.reported
        n_over = sum(map(_find_bytes, reported, reported.values())) - MAX_REPORTED_BYTES
        if n_over <= 0:
            return
        for about in sorted(reported, key=lambda one: reported[one] != VerdictKind.VICTIM.value):
            if n_over <= 0:
                break
            state = self._evicted[about] = reported.pop(about)
            n_over -= _find_bytes(about, state)
        for about in list(self._evicted)[: max(0, len(self._evicted) - _MAX_EVICTED)]:
            del self._evicted[about]

    async def _write_until_done(self) -> bool:
        """False when another Fleet has taken over."""
        while self.is_open:
            try:
                await self._write()
            except OvertakenError:
                if not await self._is_ours():
                    _log.error("another Fleet judges this cluster; its reports are not sent here")
                    self.is_open = False
            except RetryableError as error:
                self._connection.log.write(
                    ("ledger", self._key), logging.WARNING, "a report waits", error=error.message
                )
                await asyncio.sleep(_RETRY_S)
            else:
                return True
        return False

    async def _is_ours(self) -> bool:
        """Whether the document there is one that we wrote and got no answer for; then its revision is ours."""
        try:
            stored = await self._connection.read(self._connection.documents, self._key)
        except RetryableError:
            return self.is_open
        if stored is not None and stored.content == encode_document(self._document):
            self._revision = stored.revision
            return True
        return False

    async def _write(self) -> None:
        content = encode_document(self._document)
        self._revision = await self._connection.write(
            self._connection.documents, self._key, content, self._revision
        )
