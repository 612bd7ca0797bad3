"""What the judge of a cluster has reported, written down before each report leaves and confirmed after it.

A report that the pipelines do not take now is sent again until they do; until then it is not confirmed.

The document's revision is the fence: a judge that was replaced without noticing writes in vain, and sends nothing.
A report that was written down and not confirmed may not have left; the next judge sends it again. What is closed is
remembered as long as there are not `_MAX_REPORTED` newer ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ingero.errors import RetryableError
from ingero.fleet.jetstream.connection import NatsConnection, OvertakenError, StoredDocument
from ingero.fleet.jetstream.messages import ClusterLedger, decode_ledger, encode_document

LEDGER_KEY: Final = "ledger."
_MAX_REPORTED: Final = 8192
_RETRY_S: Final = 0.2
_log = logging.getLogger("ingero.fleet.nats")


def _is_known(report: Mapping[str, str | None], reported: Mapping[str, str]) -> bool:
    """Whether it says nothing else than was said: by the judge before, of what this one learned again."""
    return all(reported.get(about) == state for about, state in report.items())


@dataclass(frozen=True, slots=True)
class _Report:
    states: Mapping[str, str | None]
    send: Callable[[], bool]


class LedgerOfCluster:
    """One cluster's ledger, while this Fleet judges it.

    Args:
        connection: The way to the servers.
        token: The cluster's.

    Attributes:
        is_open: Cleared when another Fleet has taken over.
    """

    def __init__(self, connection: NatsConnection, token: str) -> None:
        self.is_open = True
        self._connection = connection
        self._key = LEDGER_KEY + token
        self._document = ClusterLedger()
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

        Raises:
            OvertakenError: Another Fleet did so meanwhile.
        """
        stored: StoredDocument | None = await self._connection.read(
            self._connection.documents, self._key
        )
        if stored is not None:
            self._document = decode_ledger(stored.content)
            self._revision = stored.revision
        reported = self._document.restore()
        self._document.reported, self._document.pending = dict(reported), {}
        await self._write()
        return reported

    def note_passed(self, seq: int) -> None:
        """A push was passed on; written down with the next report or `settle`."""
        self._document.passed_seq = max(seq, self._document.passed_seq)
        self._has_changed.set()

    def report(self, reported: Mapping[str, str | None], send: Callable[[], bool]) -> None:
        """Have a report written down and sent. On the loop."""
        self._waiting.append(_Report(reported, send))
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
            if not await self._write_until_done():
                return
            while self._unsent:
                if self._unsent[0].send():
                    self._unsent.popleft()
                    continue
                if is_last:
                    return
                await asyncio.sleep(_RETRY_S)
                if not await self._write_until_done():  # what is passed on meanwhile
                    return
            if self._document.pending:
                self._document.pending = {}
                await self._write_until_done()

    def _note_next(self) -> None:
        """Note the reports that come first and are about different things as unsent, but for those that are known."""
        document = self._document
        while self._waiting and document.pending.keys().isdisjoint(self._waiting[0].states):
            report = self._waiting.popleft()
            if _is_known(report.states, document.reported):
                continue
            self._unsent.append(report)
            for about, state in report.states.items():
                document.pending[about] = document.reported.pop(about, None)
                if state is not None:
                    document.reported[about] = state
        for about in list(document.reported)[: max(0, len(document.reported) - _MAX_REPORTED)]:
            del document.reported[about]

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
