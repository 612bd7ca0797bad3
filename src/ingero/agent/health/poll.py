"""The fallback: ask Fleet's threshold page while answers to pushes carry no threshold.

Wanted where a collector between agent and Fleet drops the headers.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import httpx
import msgspec

from ingero.agent.health.cache import (
    HeaderOutcome,
    ThresholdCache,
    ThresholdHeaders,
    check_threshold,
)
from ingero.agent.health.push_queue import MAX_PAUSE_NS
from ingero.agent.health.transport import TransportSettings, open_http_sender
from ingero.errors import BadDataError
from ingero.otlp.client.http import read_short
from ingero.otlp.client.reply import parse_retry_after
from ingero.otlp.names import ContentType
from ingero.telemetry.clock import Clock
from ingero.wire.names import THRESHOLD_PATH

MAX_BODY_BYTES: Final = 8 * 1024
POLL_SPREAD: Final = 0.2
_HEADERS: Final = {"Accept": ContentType.JSON.value}


class _Page(msgspec.Struct):
    threshold: float
    quorum_met: bool
    panic: bool = False


class ThresholdPoller:
    """Asks Fleet's threshold page while answers to pushes carry no threshold.

    Args:
        settings: Where the page is, and with which token to ask.
        cache: Receives the answer; decides whether to ask at all.
        clock: Stamps answers.
        interval_ns: Between two questions.
        spread: A number in [-1, 1] each call, to spread the questions of many agents.
    """

    def __init__(
        self,
        settings: TransportSettings,
        cache: ThresholdCache,
        clock: Clock,
        interval_ns: int,
        spread: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._clock = clock
        self._interval_ns = interval_ns
        self._spread = spread
        self._sender = open_http_sender(settings)
        self._url = f"{settings.endpoint.base}{THRESHOLD_PATH}{settings.query}"
        self.n_asked = 0
        self.n_failed = 0
        self.last_detail = ""

    def poll(self) -> int:
        """Ask once if needed.

        Returns:
            Nanoseconds until the next call: the interval, spread by a fifth either way, or what Fleet asked for.
        """
        usual_ns = round(self._interval_ns * (1 + POLL_SPREAD * self._spread()))
        if self._cache.is_piggybacked:
            return usual_ns
        self.n_asked += 1
        try:
            headers = self._settings.request_headers() | _HEADERS
            with self._sender.client.stream("GET", self._url, headers=headers) as response:
                body = read_short(response, MAX_BODY_BYTES)
        except (httpx.HTTPError, BadDataError) as error:
            return self._fail(str(error) or type(error).__name__, usual_ns)
        if response.status_code != HTTPStatus.OK:
            pause_ns = self._asked_pause(response)
            return self._fail(f"{response.status_code} from {self._url}", pause_ns or usual_ns)
        return self._read(body, usual_ns)

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()

    def _read(self, body: bytes | None, usual_ns: int) -> int:
        if body is None:
            return self._fail(f"the threshold page is longer than {MAX_BODY_BYTES} bytes", usual_ns)
        try:
            page = msgspec.json.decode(body, type=_Page)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._fail(f"the threshold page cannot be read: {error}", usual_ns)
        headers = read_page(page.threshold, quorum_met=page.quorum_met, panic=page.panic)
        self.last_detail = headers.reason
        self._cache.record_poll(headers, self._clock.mono_ns())
        return usual_ns

    def _asked_pause(self, response: httpx.Response) -> int | None:
        pause_ns = parse_retry_after(response.headers.get("Retry-After"), self._clock.wall_ns())
        if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            pause_ns = 2 * self._interval_ns if pause_ns is None else pause_ns
        elif not response.is_server_error:
            return None
        return None if pause_ns is None else min(pause_ns, max(MAX_PAUSE_NS, 2 * self._interval_ns))

    def _fail(self, detail: str, delay_ns: int) -> int:
        self.n_failed += 1
        self.last_detail = detail
        return delay_ns


def read_page(threshold: float, *, quorum_met: bool, panic: bool = False) -> ThresholdHeaders:
    """The headers that the page's values stand for; 0 without quorum is Fleet's "none yet", not a threshold of 0."""
    if panic:
        return ThresholdHeaders(HeaderOutcome.WITHHELD)
    if threshold == 0 and not quorum_met:
        return ThresholdHeaders(HeaderOutcome.MISS)
    return check_threshold(threshold, quorum_met=quorum_met)
