"""gRPC's health service beside OTLP, which Kubernetes' ``grpc`` probes and clients that balance load ask.

Open to everyone, as health is elsewhere. Only ``Check``: ``Watch`` would hold one of the server's four threads for each
caller. No package is needed for it, because a HealthCheckRequest looks like a StringValue on the wire, and an answer is
one of two constants.

Source: grpc, doc/health-checking.md and src/proto/grpc/health/v1/health.proto.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue

from ingero.otlp.names import GRPC_SERVICES

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
SERVING: Final = b"\x08\x01"
NOT_SERVING: Final = b"\x08\x02"
"""HealthCheckResponse with field 1, ``status``."""
_KNOWN: Final = frozenset({"", HEALTH_SERVICE, *GRPC_SERVICES.values()})


def build_health_handler(
    is_serving: Callable[[], bool],
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """The service; all services of a server have one state.

    Args:
        is_serving: Whether data is taken now. Any thread.
    """

    def check(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            service = StringValue.FromString(body).value
        except DecodeError:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            return b""
        if service not in _KNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("unknown service")
            return b""
        return SERVING if is_serving() else NOT_SERVING

    return grpc.method_handlers_generic_handler(
        HEALTH_SERVICE, {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
