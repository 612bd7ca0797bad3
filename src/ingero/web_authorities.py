"""The web's certificate authorities, read at the first connection by TLS instead of for each client.

httpx reads them, 20 ms of a processor, whenever a client is made, also of one that only ever speaks plain HTTP.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any, Self

import httpx
from typing_extensions import override


class WebAuthorities(ssl.SSLContext):
    """What to give httpx as ``verify`` where a client trusts whom httpx trusts.

    Args:
        is_env_trusted: ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name other authorities. A file that cannot be read fails
            each connection by TLS, as an `httpx.ConnectError`.
    """

    _read: ssl.SSLContext | None = None

    def __new__(cls, *, is_env_trusted: bool = True) -> Self:  # noqa: ARG004, D102 - `__init__` takes it
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, *, is_env_trusted: bool = True) -> None:
        self._is_env_trusted = is_env_trusted
        self._protocols: list[str] = []

    @override
    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        self._protocols = list(alpn_protocols)

    @override
    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self._get_read().wrap_socket(*args, **options)

    @override
    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._get_read().wrap_bio(*args, **options)

    def _get_read(self) -> ssl.SSLContext:
        if self._read is None:  # two threads may both read them, and either result will do
            self._read = httpx.create_ssl_context(trust_env=self._is_env_trusted)
        self._read.set_alpn_protocols(self._protocols)
        return self._read
