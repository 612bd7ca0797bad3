"""Gets alerts to one receiver, in order, for as long as it takes.

A failure that may pass is tried again after a delay that doubles and starts over after a success. A refusal that will
not pass (4xx) drops the alert. A receiver that is away longer than `MAX_WAITING` alerts loses the oldest, and one that
is away at the end loses what waits. All of it is counted and logged.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httpx

from ingero import __version__
from ingero.agent.events.alert.backends import Backend
from ingero.agent.events.alert.episodes import Alert
from ingero.errors import BadDataError
from ingero.units import NS_PER_S
from ingero.web_authorities import WebAuthorities

MAX_WAITING: Final = 1000
FIRST_DELAY_NS: Final = NS_PER_S
MAX_DELAY_NS: Final = 60 * NS_PER_S
_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_LOG: Final = logging.getLogger("ingero.alerter")


@dataclass(slots=True)
class DeliveryCounts:
    """Alerts since the start, by what became of them.

    Attributes:
        n_sent: Alerts that the receiver took.
        n_failed: Tries that failed and may succeed later.
        n_retried: Tries after a failure.
        n_refused: Alerts that it will not take.
        n_dropped: Alerts dropped because too many waited, or because the program ended.
    """

    n_sent: int = 0
    n_failed: int = 0
    n_retried: int = 0
    n_refused: int = 0
    n_dropped: int = 0


class Delivery:
    """One receiver's queue.

    Args:
        backend: The receiver.
        client: Makes the requests.
        wait: ``wait(duration_ns)`` waits and returns whether to stop.
    """

    def __init__(self, backend: Backend, client: httpx.Client, wait: Callable[[int], bool]) -> None:
        self.counts = DeliveryCounts()
        self._backend = backend
        self._client = client
        self._wait = wait
        self._wake = threading.Condition()
        self._waiting: deque[Alert] = deque()
        self._is_closed = False

    @property
    def name(self) -> str:
        """The receiver's, for logs and metrics."""
        return self._backend.name

    def offer(self, alert: Alert) -> None:
        """Hand an alert over; never blocks."""
        with self._wake:
            if len(self._waiting) >= MAX_WAITING:
                self._drop(self._waiting.popleft(), "too many wait")
            self._waiting.append(alert)
            self._wake.notify()

    def run(self) -> None:
        """Deliver until closed; for a thread of its own."""
        while True:
            with self._wake:
                while not self._waiting and not self._is_closed:
                    self._wake.wait()
                if not self._waiting:
                    return
                alert = self._waiting.popleft()
            if self._deliver(alert):
                self._drop_rest(alert)
                return

    def _drop_rest(self, alert: Alert) -> None:
        with self._wake:
            waiting, self._waiting = [alert, *self._waiting], deque()
        for one in waiting:
            self._drop(one, "the program ends")

    def _drop(self, alert: Alert, reason: str) -> None:
        self.counts.n_dropped += 1
        _LOG.error("%s: %s of %s dropped: %s", self._backend.name, alert.action, alert.key, reason)

    def close(self) -> None:
        """Let `run` return once nothing waits, or at once when ``wait`` returns True."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _deliver(self, alert: Alert) -> bool:
        """Try until it is taken or refused; True when it is to stop meanwhile."""
        delay_ns = FIRST_DELAY_NS
        while not self._try(alert):
            if self._wait(delay_ns):
                return True
            self.counts.n_retried += 1
            delay_ns = min(2 * delay_ns, MAX_DELAY_NS)
        return False

    def _try(self, alert: Alert) -> bool:
        """Post once; False when it is worth another try."""
        is_over = self._post(alert)
        self.counts.n_failed += not is_over
        return is_over

    def _post(self, alert: Alert) -> bool:
        name = self._backend.name
        try:
            post = self._backend.build(alert)
            response = self._client.post(post.url, json=post.body, headers=dict(post.headers))
        except (httpx.HTTPError, httpx.InvalidURL, BadDataError) as error:
            # The address may be a secret: only the kind of the failure is logged.
            _LOG.warning(
                "%s: %s of %s failed: %s", name, alert.action, alert.key, type(error).__name__
            )
            return False
        status = response.status_code
        if response.is_success:
            self.counts.n_sent += 1
            _LOG.info("%s: %s of %s delivered", name, alert.action, alert.key)
            return True
        if response.is_client_error and status not in _PASSING:
            self.counts.n_refused += 1
            _LOG.error("%s: %s of %s refused with %d", name, alert.action, alert.key, status)
            return True
        _LOG.warning("%s: %s of %s failed with %d", name, alert.action, alert.key, status)
        return False


def build_client(timeout_s: float) -> httpx.Client:
    """A client that follows no redirect: a secret must not travel to where a receiver points."""
    return httpx.Client(
        timeout=timeout_s,
        follow_redirects=False,
        verify=WebAuthorities(),
        headers={"User-Agent": f"ingero-alerter/{__version__}"},
    )
