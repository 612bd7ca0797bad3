"""OTLP/gRPC on grpcio's synchronous server: four threads, bytes in and bytes out.

The synchronous server was measured faster than ``grpc.aio`` here, with metadata in both directions; its cost is grpcio's Python layer, so protobuf is
left to the intake. A call over the limit is turned away by the thread that would have served it, without reading its
message, so that it gets RetryInfo; twice over, by grpcio itself.

Source: OTLP specification 1.x, "OTLP/gRPC" (RESOURCE_EXHAUSTED is retryable only with RetryInfo); grpc.io, "Keepalive".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import grpc
from typing_extensions import override

from ingero.config import Endpoint
from ingero.config.tls import TlsServerConfig
from ingero.errors import IngeroError
from ingero.fleet.component import PushContext
from ingero.fleet.receivers.otlp.config import GrpcConfig, KeepaliveServerParameters
from ingero.fleet.receivers.otlp.intake import (
    DRAINING,
    OVERLOADED,
    AnswerStatus,
    PushIntake,
    PushOutcome,
)
from ingero.fleet.receivers.otlp.telemetry import Reason, Tally
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bodies import encode_retry_status, encode_taken
from ingero.serving.tls import build_server_context
from ingero.units import NS_PER_MS
from ingero.wire.names import Header

_LOG: Final = logging.getLogger("ingero.fleet.tls")
N_THREADS: Final = 4
"""Measured: one thread serves a third fewer calls, sixteen serve no more."""

_SERVICES: Final = {
    Signal.METRICS: "opentelemetry.proto.collector.metrics.v1.MetricsService",
    Signal.LOGS: "opentelemetry.proto.collector.logs.v1.LogsService",
    Signal.TRACES: "opentelemetry.proto.collector.trace.v1.TraceService",
}
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS: Final = "grpc-status-details-bin"
_PROTOBUF: Final = str(ContentType.PROTOBUF)
_CLUSTER_HINT: Final = str(Header.CLUSTER_HINT)
_THRESHOLD: Final = str(Header.GRPC_THRESHOLD)
_QUORUM_MET: Final = str(Header.GRPC_QUORUM_MET)
_PANIC: Final = str(Header.GRPC_PANIC)
_MAX_HINT_CHARS: Final = 1024


class _CountingPool(futures.ThreadPoolExecutor):
    """A thread pool that knows how many calls it has not finished."""

    def __init__(self) -> None:
        super().__init__(N_THREADS, thread_name_prefix="otlp-grpc")
        self._counting = threading.Lock()
        self.n_unfinished = 0

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        with self._counting:
            self.n_unfinished += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._count_down)
        return future

    def _count_down(self, _future: futures.Future[Any]) -> None:
        with self._counting:
            self.n_unfinished -= 1


class OtlpGrpcServer:
    """One listening gRPC port.

    Args:
        config: Endpoint and limits.
        intake: Where messages go.
        tally: Counters.
    """

    def __init__(self, config: GrpcConfig, intake: PushIntake, tally: Tally) -> None:
        self._config = config
        self._intake = intake
        self._tally = tally
        self._pool = _CountingPool()
        self._server: grpc.Server | None = None
        self._certificates = _Certificates(config.tls, tally) if config.tls else None
        self.bound = config.endpoint

    def start(self) -> None:
        """Bind and serve.

        Raises:
            IngeroError: The address cannot be bound or a certificate cannot be read.
        """
        server = grpc.server(
            self._pool,
            handlers=[self._build_handler(signal) for signal in Signal],
            options=_build_options(self._config),
            maximum_concurrent_rpcs=2 * self._config.max_in_flight,
        )
        endpoint = self._config.endpoint
        address = f"{endpoint}" if endpoint.host else f"[::]:{endpoint.port}"
        try:
            if self._certificates is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._certificates.build_credentials())
        except RuntimeError as error:
            self._pool.shutdown(wait=False)
            raise IngeroError(
                f"cannot listen on {endpoint} for gRPC: {error}",
                hint=f"`ss -ltnp 'sport = :{endpoint.port}'` shows who has the port",
            ) from error
        server.start()
        self.bound = Endpoint(endpoint.host, port)
        self._server = server

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight finish for ``grace_s``, then cancel them. Blocks."""
        if self._server is not None:
            self._server.stop(grace_s).wait()
            self._server = None
        self._pool.shutdown(wait=True)

    def _build_handler(self, signal: Signal) -> grpc.GenericRpcHandler[bytes, bytes]:
        def export(body: bytes, context: grpc.ServicerContext) -> bytes:
            return self._export(signal, body, context)

        return grpc.method_handlers_generic_handler(
            _SERVICES[signal], {"Export": grpc.unary_unary_rpc_method_handler(export)}
        )

    def _export(self, signal: Signal, body: bytes, context: grpc.ServicerContext) -> bytes:
        push, authorization = _read_metadata(context)
        refusal = self._find_refusal(signal)
        is_known = self._intake.is_open
        if not is_known:
            is_known = self._intake.authenticate(authorization, push)
        if refusal is not None:
            outcome, reason = refusal
            self._tally.refuse_request(reason)
        elif not is_known:
            outcome = PushOutcome(AnswerStatus.UNAUTHENTICATED, "missing or wrong credentials")
            self._tally.refuse_request(Reason.UNAUTHENTICATED)
            self._intake.tell_refused(_find_host(context.peer()), push)
        else:
            outcome = self._intake.take(body, signal, _PROTOBUF, push)
        threshold = self._intake.find_threshold(push) if is_known else None
        return _answer(context, signal, outcome, threshold)

    def _find_refusal(self, signal: Signal) -> tuple[PushOutcome, Reason] | None:
        if self._intake.draining:
            return DRAINING, Reason.DRAINING
        if not self._intake.accepts(signal):
            message = f"no pipeline takes {signal} from this receiver"
            return PushOutcome(AnswerStatus.NOT_FOUND, message), Reason.NO_PIPELINE
        if self._pool.n_unfinished > self._config.max_in_flight:
            return OVERLOADED, Reason.OVERLOADED
        return None


def _read_metadata(context: grpc.ServicerContext) -> tuple[PushContext, str | None]:
    push = PushContext()
    authorization: str | None = None
    for key, value in context.invocation_metadata():
        if key == _CLUSTER_HINT and isinstance(value, str):
            push.cluster_hint = value[:_MAX_HINT_CHARS]
        elif key == "authorization" and isinstance(value, str):
            authorization = value
    return push, authorization


def _find_host(peer: str) -> str:
    """The host in gRPC's ``ipv4:127.0.0.1:1234`` or ``ipv6:%5B::1%5D:1234``."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def _answer(
    context: grpc.ServicerContext,
    signal: Signal,
    outcome: PushOutcome,
    threshold: tuple[str, str] | None,
) -> bytes:
    trailing: list[tuple[str, str | bytes]] = []
    if threshold is not None:
        pair = ((_THRESHOLD, threshold[0]), (_QUORUM_MET, threshold[1]))
        told = pair if threshold[0] else ((_PANIC, threshold[1]),)
        context.send_initial_metadata(told)
        trailing += told
    verdict = outcome.verdict
    if verdict is not AnswerStatus.TAKEN:
        context.set_code(_CODES[verdict.grpc])
        context.set_details(outcome.message)
        if outcome.retry_after_s:
            details = encode_retry_status(verdict.grpc, outcome.message, outcome.retry_after_s)
            trailing.append((_DETAILS, details))
    if trailing:
        context.set_trailing_metadata(tuple(trailing))
    if verdict is not AnswerStatus.TAKEN:
        return b""
    return encode_taken(signal, outcome.n_rejected, outcome.message, is_json=False)


class _Certificates:
    """Reads certificate files again when they changed; grpcio asks before each handshake, on its own threads."""

    def __init__(self, tls: TlsServerConfig, tally: Tally) -> None:
        self._tls = tls
        self._tally = tally
        self._lock = threading.Lock()
        self._said = ""  # asked before each handshake: one line for one reason
        self._stamp = self._read_stamp()

    def build_credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files. Raises IngeroError when a file cannot be read now."""
        try:
            first = self._read()
        except OSError as error:
            raise IngeroError(f"{error.filename}: {error.strerror}") from error
        return grpc.dynamic_ssl_server_credentials(
            first,
            self._find_renewed,  # type: ignore[arg-type]  # None is "no change", says its docstring
            require_client_authentication=self._tls.client_ca_file is not None,
        )

    def _find_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            try:
                stamp = self._read_stamp()
                if stamp == self._stamp:
                    return None
                build_server_context(self._tls)  # a pair that does not fit, gRPC would only print
                renewed = self._read()
            except (OSError, IngeroError) as error:
                self._tally.bad_certificate(1)
                fields = {"component": "receivers.otlp", "error": str(error)}
                message = "renewed certificate cannot be used; the old one stays"
                if str(error) != self._said:
                    _LOG.warning(message, extra={"fields": fields})
                self._said = str(error)
                return None
            self._said = ""
            self._stamp = stamp
            return renewed

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        files = (self._tls.cert_file, self._tls.key_file, self._tls.client_ca_file)
        stats = [Path(file).stat() for file in files if file]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        assert self._tls.key_file is not None
        assert self._tls.cert_file is not None
        pair = (Path(self._tls.key_file).read_bytes(), Path(self._tls.cert_file).read_bytes())
        authorities = self._tls.client_ca_file
        return grpc.ssl_server_certificate_configuration(
            [pair], Path(authorities).read_bytes() if authorities else None
        )


def _build_options(config: GrpcConfig) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", config.max_recv_msg_size_mib << 20),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second listener
    ]
    if config.max_concurrent_streams is not None:
        options.append(("grpc.max_concurrent_streams", config.max_concurrent_streams))
    if config.keepalive is not None:
        options += _build_keepalive(config.keepalive.server_parameters)
    return options


def _build_keepalive(parameters: KeepaliveServerParameters) -> list[tuple[str, int]]:
    named = {
        "grpc.max_connection_idle_ms": parameters.max_connection_idle,
        "grpc.max_connection_age_ms": parameters.max_connection_age,
        "grpc.max_connection_age_grace_ms": parameters.max_connection_age_grace,
        "grpc.keepalive_time_ms": parameters.time,
        "grpc.keepalive_timeout_ms": parameters.timeout,
    }
    return [(name, max(ns // NS_PER_MS, 1)) for name, ns in named.items() if ns is not None]
