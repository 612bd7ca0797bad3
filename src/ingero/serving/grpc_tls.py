"""TLS credentials of gRPC servers that follow their files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from ingero.config.tls import TlsServerConfig
from ingero.errors import IngeroError
from ingero.serving.tls import build_server_context, stamp_files


class RenewedCredentials:
    """Reads certificate files again when they changed; grpcio asks before each handshake, on its own threads.

    Args:
        tls: The files.
        on_bad: Called with the reason, each time that changed files cannot be used; the old ones stay.
    """

    def __init__(self, tls: TlsServerConfig, on_bad: Callable[[str], None]) -> None:
        self._tls = tls
        self._on_bad = on_bad
        self._files = [
            file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file is not None
        ]
        self._lock = threading.Lock()
        self._stamp = stamp_files(self._files)

    def build(self) -> grpc.ServerCredentials:
        """Credentials for a listening port.

        Raises:
            IngeroError: A file cannot be used now.
        """
        build_server_context(self._tls)  # says what is wrong with a file; grpcio would not
        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._find_renewed,  # type: ignore[arg-type]  # None is "no change", says its docstring
            require_client_authentication=self._tls.client_ca_file is not None,
        )

    def _find_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            try:
                stamp = stamp_files(self._files)
                if stamp == self._stamp:
                    return None
                build_server_context(self._tls)  # a pair that does not fit, gRPC would only print
                renewed = self._read()
            except (OSError, IngeroError) as error:
                self._on_bad(str(error))
                return None
            self._stamp = stamp
            return renewed

    def _read(self) -> grpc.ServerCertificateConfiguration:
        assert self._tls.key_file is not None
        assert self._tls.cert_file is not None
        pair = (Path(self._tls.key_file).read_bytes(), Path(self._tls.cert_file).read_bytes())
        authorities = self._tls.client_ca_file
        return grpc.ssl_server_certificate_configuration(
            [pair], Path(authorities).read_bytes() if authorities else None
        )
