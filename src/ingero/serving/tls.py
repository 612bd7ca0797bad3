"""TLS contexts from settings, and certificates that change while connections stay.

A renewed certificate is loaded into the context that already listens, so new handshakes get it and open connections go
on. Authorities are read once; a changed ``ca_file`` or ``client_ca_file`` needs a reload of the configuration.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from ingero.config.tls import TlsClientConfig, TlsFiles, TlsServerConfig
from ingero.errors import IngeroError

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
FileStamps = tuple[tuple[int, int, int], ...]


def build_server_context(
    config: TlsServerConfig, on_refused: Callable[[str], None] | None = None
) -> ssl.SSLContext:
    """A context for a listening socket; demands client certificates when ``client_ca_file`` is set.

    Args:
        config: Files and versions.
        on_refused: Called with the reason, for each handshake that fails; servers on asyncio do not say.

    Raises:
        IngeroError: A file cannot be read or is not what it should be; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if on_refused is not None:
        context.sslobject_class = _build_telling(on_refused)
    _set_versions(context, config)
    _load_chain(context, config)
    authorities = config.client_ca_file or config.ca_file
    if authorities:
        with _naming(authorities):
            context.load_verify_locations(authorities)
    if config.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def build_client_context(config: TlsClientConfig) -> ssl.SSLContext:
    """A context for outgoing connections; ask only when ``insecure`` is off.

    Raises:
        IngeroError: A file cannot be read or is not what it should be; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _set_versions(context, config)
    if config.ca_file:
        with _naming(config.ca_file):
            context.load_verify_locations(config.ca_file)
    if config.ca_file is None or config.include_system_ca_certs_pool:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if config.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.cert_file:
        _load_chain(context, config)
    return context


def _build_telling(on_refused: Callable[[str], None]) -> type[ssl.SSLObject]:
    """An `ssl.SSLObject` that tells of its failed handshake.

    Both asyncio's and uvloop's servers make theirs by the context.
    """

    class TellingObject(ssl.SSLObject):
        @override
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                on_refused(error.reason or str(error))
                raise

    return TellingObject


def find_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Who a verified certificate, as `ssl.SSLSocket.getpeercert` has it, is of.

    Its subject alternative names; the subject's common name where it has none (RFC 6125, 6.4.4).
    """
    if not certificate:
        return ()
    names = [name for _, name in certificate.get("subjectAltName", ()) if isinstance(name, str)]
    if names:
        return tuple(names)
    subject = certificate.get("subject", ())
    return tuple(value for part in subject for key, value in part if key == "commonName")


class CertificateReloader:
    """Notices changed certificate files and loads them into a living context.

    Args:
        context: What to load into.
        config: Where the certificate and key are.
    """

    def __init__(self, context: ssl.SSLContext, config: TlsFiles) -> None:
        self._context = context
        self._config = config
        self._loaded = self._stamp()

    def reload_if_changed(self) -> bool:
        """Load the pair if a file changed; True when it did.

        Raises:
            IngeroError: The new pair cannot be used; the old one stays, and the next call tries again.
        """
        stamp = self._stamp()
        if stamp == self._loaded:
            return False
        _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._config)
        _load_chain(self._context, self._config)
        self._loaded = stamp
        return True

    def _stamp(self) -> FileStamps:
        names = (self._config.cert_file, self._config.key_file)
        return stamp_files([name for name in names if name is not None])


def stamp_files(names: Sequence[str]) -> FileStamps:
    """What tells that a file was replaced or written: time of change, inode and size of each.

    Raises:
        IngeroError: One is not there.
    """
    stats = []
    for name in names:
        with _naming(name):
            stat = Path(name).stat()
        stats.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return tuple(stats)


def _set_versions(context: ssl.SSLContext, config: TlsFiles) -> None:
    context.minimum_version = _VERSIONS[config.min_version]
    if config.max_version is not None:
        context.maximum_version = _VERSIONS[config.max_version]


def _load_chain(context: ssl.SSLContext, config: TlsFiles) -> None:
    assert config.cert_file is not None
    for name in (config.cert_file, config.key_file):
        if name is not None:
            with _naming(name):
                Path(name).open("rb").close()
    with _naming(f"{config.cert_file} with {config.key_file}"):
        context.load_cert_chain(config.cert_file, config.key_file)


@contextmanager
def _naming(file: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise IngeroError(f"{file}: not usable as PEM ({error.reason or error})") from error
    except OSError as error:
        raise IngeroError(f"{file}: {error.strerror or error}") from error
