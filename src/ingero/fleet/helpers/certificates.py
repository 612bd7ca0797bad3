"""Certificates of listening sockets while they serve: renewed ones are loaded, bad ones are logged.

Beside the components that listen; `ingero.serving.tls` does the work.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from ingero.config import Endpoint
from ingero.config.tls import TlsServerConfig
from ingero.errors import IngeroError
from ingero.fleet.component import Host
from ingero.serving.tls import CertificateReloader, build_server_context
from ingero.telemetry.declare import counter
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S

HANDSHAKES_REFUSED = counter(
    "ingero_fleet_tls_handshakes_refused_total",
    "TLS handshakes that failed: no or a foreign client certificate, an old version of TLS, plain text.",
    "component",
)
_FLUSH_NS = 10 * NS_PER_S
_log = logging.getLogger("ingero.fleet.tls")


def open_server_context(
    tls: TlsServerConfig | None, host: Host, component: str, endpoint: Endpoint
) -> ssl.SSLContext | None:
    """A context for a listening socket; None without TLS.

    Refused handshakes are counted, and logged a few lines a minute.

    Raises:
        IngeroError: A file cannot be used.
    """
    counting = host.meter.counter(HANDSHAKES_REFUSED)
    if tls is None:
        return None
    refused = counting.bound(component=component)
    log = RateLimitedLog(_log, host.clock)
    host.every(_FLUSH_NS, log.flush)

    def on_refused(reason: str) -> None:
        refused(1)
        message = "TLS handshake refused"
        log.write(
            "handshake",
            logging.WARNING,
            message,
            component=component,
            endpoint=str(endpoint),
            error=reason,
        )

    return build_server_context(tls, on_refused)


def open_renewing_context(
    tls: TlsServerConfig | None, host: Host, component: str, endpoint: Endpoint
) -> ssl.SSLContext | None:
    """`open_server_context` whose renewed files are loaded while it serves."""
    context = open_server_context(tls, host, component, endpoint)
    if tls is not None and context is not None and tls.reload_interval:
        reloader = CertificateReloader(context, tls)
        watch_certificate(reloader, host, component, tls.reload_interval)
    return context


def report_bad_certificates(
    host: Host, component: str, on_bad: Callable[[], None]
) -> Callable[[str], None]:
    """What is called with the reason when renewed files cannot be used: counts each time, logs a line a minute."""
    log = RateLimitedLog(_log, host.clock)

    def report(reason: str) -> None:
        on_bad()
        message = "renewed certificate cannot be used; the old one stays"
        log.write("bad", logging.WARNING, message, component=component, error=reason)

    return report


def watch_certificate(
    reloader: CertificateReloader,
    host: Host,
    component: str,
    interval_ns: int,
    on_bad: Callable[[], None] = lambda: None,
) -> None:
    """Load renewed files at this interval; of a bad pair the old one stays, which is logged.

    Args:
        reloader: Of the context that serves.
        host: Runs the timer.
        component: Whose certificate it is, for the log.
        interval_ns: How often the files are checked.
        on_bad: Called each time that the files cannot be used.
    """
    report = report_bad_certificates(host, component, on_bad)

    def renew() -> None:
        try:
            is_new = reloader.reload_if_changed()
        except IngeroError as error:
            report(error.message)
        else:
            if is_new:
                _log.info("certificate renewed", extra={"fields": {"component": component}})

    host.every(interval_ns, renew)
