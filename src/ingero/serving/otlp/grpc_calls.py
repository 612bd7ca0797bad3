"""What both OTLP/gRPC servers share: which methods there are, metadata in, answers out, a bound port.

Source: opentelemetry-proto collector services; OTLP specification 1.x, "OTLP/gRPC" (RESOURCE_EXHAUSTED is retryable
only with RetryInfo); google.rpc.Status in ``grpc-status-details-bin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

import grpc
import grpc.aio

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.otlp.names import (
    GRPC_SERVICES,
    GRPC_STATUS_DETAILS,
    SIGNAL_PATHS,
    ContentType,
    Signal,
)
from ingero.serving.otlp.answers import (
    AnswerStatus,
    OtlpAnswer,
    encode_answer,
    encode_retry_status,
)
from ingero.serving.otlp.handler import (
    MAX_HINT_CHARS,
    AnswerHeaders,
    OtlpHandler,
    OtlpRequest,
)
from ingero.wire.names import Header

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_PROTOBUF: Final = str(ContentType.PROTOBUF)
_CLUSTER_HINT: Final = str(Header.CLUSTER_HINT)


@dataclass(frozen=True, slots=True)
class OtlpGrpcSettings:
    """How one OTLP/gRPC listener treats calls.

    Attributes:
        max_message_bytes: Largest request, uncompressed.
        max_in_flight: Calls at once; twice as many are turned away by grpcio itself.
        options: Further channel arguments.
        shares_port: Whether other processes of this user may listen on the same port.
    """

    max_message_bytes: int = 4 << 20
    max_in_flight: int = 1024
    options: tuple[tuple[str, int], ...] = ()
    shares_port: bool = False

    def build_options(self) -> list[tuple[str, int]]:
        """All channel arguments."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # Unless asked for, a port that is taken is an error and not a second listener.
            ("grpc.so_reuseport", int(self.shares_port)),
            *self.options,
        ]


def build_handlers(
    build: Callable[[Signal], grpc.RpcMethodHandler[bytes, bytes]],
) -> list[grpc.GenericRpcHandler[bytes, bytes]]:
    """The handler of each signal's ``Export``."""
    return [
        grpc.method_handlers_generic_handler(service, {"Export": build(signal)})
        for signal, service in GRPC_SERVICES.items()
    ]


def bind_port(
    server: grpc.Server | grpc.aio.Server,
    endpoint: Endpoint,
    credentials: grpc.ServerCredentials | None,
) -> Endpoint:
    """Listen; returns where, with the port that the kernel chose.

    Raises:
        IngeroError: The address cannot be had.
    """
    address = str(endpoint) if endpoint.host else f"[::]:{endpoint.port}"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise IngeroError(
            f"cannot listen on {endpoint} for OTLP/gRPC: {error}",
            hint=f"`ss -ltnp 'sport = :{endpoint.port}'` shows who has the port",
        ) from error
    return Endpoint(endpoint.host, port)


def open_call(signal: Signal, context: Any, handler: OtlpHandler) -> OtlpRequest:  # noqa: ANN401 - of either server
    """What a call's metadata says, as a request that the handler has opened."""
    request = OtlpRequest(
        transport="grpc",
        method="Export",
        path=SIGNAL_PATHS[signal],
        peer=_find_host(context.peer()),
        peer_names=_find_names(context.auth_context()),
        signal=signal,
        content_type=_PROTOBUF,
    )
    for key, value in context.invocation_metadata() or ():
        if key == _CLUSTER_HINT and isinstance(value, str):
            request.hint = value[:MAX_HINT_CHARS]
        elif key == "authorization" and isinstance(value, str):
            request.authorization = value
    request.context = handler.open(request)
    return request


def _find_names(shown: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Who a client's certificate is of, as `ingero.serving.tls.find_names` has it; nothing where it showed none."""
    if not shown:
        return ()
    names = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or ()
    return tuple(name.decode("utf-8", "replace") for name in names)


@lru_cache(maxsize=4096)
def _find_host(peer: str) -> str:
    """The host in gRPC's ``ipv4:127.0.0.1:1234`` or ``ipv6:%5B::1%5D:1234``."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def write_answer(
    context: Any,  # noqa: ANN401 - of either server
    signal: Signal,
    answer: OtlpAnswer,
    headers: AnswerHeaders | None,
) -> bytes:
    """Set a call's status and trailing metadata; returns its message."""
    trailing: list[tuple[str, str | bytes]] = [] if headers is None else [*headers.metadata]
    is_taken = answer.status is AnswerStatus.TAKEN
    if not is_taken:
        context.set_code(_CODES[answer.status.grpc])
        context.set_details(answer.message)
        if answer.retry_after_s:
            trailing.append((GRPC_STATUS_DETAILS, encode_retry_status(answer)))
    if trailing:
        context.set_trailing_metadata(tuple(trailing))
    return encode_answer(answer, signal, is_json=False) if is_taken else b""
