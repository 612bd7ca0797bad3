"""Addresses as a policy has them."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

from ingero.config.types import Endpoint

_PORTS: Final = {"http": 80, "https": 443}
"""What browsers leave out of an origin. Source: RFC 6454, 6.1, and RFC 3986, 6.2.3."""


def find_origin(url: str) -> str:
    """Scheme, host and port as a browser writes them in ``Origin``; raises ValueError for what is no host or port."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    if ":" in host:
        shown = f"[{ip_address(host).compressed}]"
    else:
        shown = host if host.isascii() else host.encode("idna").decode()
    is_usual = port is None or port == _PORTS.get(parts.scheme)
    return f"{parts.scheme}://{shown}" + ("" if is_usual else f":{port}")


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("should be http://HOST:PORT or https://HOST:PORT")
    find_origin(url)
    if parts.query or parts.fragment:
        raise ValueError("should have no query")
    return url.rstrip("/")


def _check_safe_url(url: str) -> str:
    parts = urlsplit(_check_url(url))
    if parts.scheme != "https" and not Endpoint(parts.hostname or "", 0).is_loopback:
        raise ValueError("should be https: what it is sent takes nodes out of service")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]
SafeUrl = Annotated[str, AfterValidator(_check_safe_url)]
"""``https``, or ``http`` on loopback."""
