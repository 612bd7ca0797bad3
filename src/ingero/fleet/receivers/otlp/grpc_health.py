"""gRPC's health service beside OTLP, which Kubernetes' ``grpc`` probes and clients that balance load ask.

Open to everyone, as health is elsewhere. A thread that sends an answer waits until flow control lets it through, so
each `Watch` has a thread of a pool of its own: a client that never reads holds up no other call. (By default the
package sends on the server's threads, by grpcio's callback for streams, and under the lock that `Check` needs.)

Source: grpc, doc/health-checking.md; grpcio-health-checking, ``grpc_health/v1/health.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typing_extensions import override

MAX_WATCHERS: Final = 64
_N_REFUSING: Final = 2
_UNKNOWN: Final = "unknown"
_STATUS: Final = health_pb2.HealthCheckResponse


class _BoundedServicer(health.HealthServicer):
    """The package's servicer, for so many watchers at once."""

    def __init__(self) -> None:
        pool = ThreadPoolExecutor(MAX_WATCHERS + _N_REFUSING, thread_name_prefix="grpc-health")
        super().__init__(experimental_non_blocking=False, experimental_thread_pool=pool)
        self._pool = pool
        self._known = {health.OVERALL_HEALTH}
        self._watching = threading.Lock()
        self._n_watching = 0
        self._watches: set[Any] = set()

    @override
    def set(self, service: str, status: Any) -> None:
        self._known.add(service)
        super().set(service, status)

    @override
    def Watch(
        self,
        request: Any,
        context: grpc.ServicerContext,
        send_response_callback: Callable[..., Any] | None = None,
    ) -> Any:
        assert send_response_callback is None, "only where experimental_non_blocking is asked for"
        with self._watching:
            is_full = self._n_watching >= MAX_WATCHERS
            self._n_watching += not is_full
        if is_full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already")
        if request.service not in self._known:  # the package keeps each name that is watched
            request = health_pb2.HealthCheckRequest(service=_UNKNOWN)
        watch = super().Watch(request, context)
        with self._watching:
            self._watches.add(watch)
        if not context.add_callback(lambda: self._forget(watch)):
            self._forget(watch)  # it ended meanwhile
        return watch

    def close(self) -> None:
        """Say that nothing is served any more, and end every stream: a server that stops would wait for them."""
        self.enter_graceful_shutdown()
        with self._watching:
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        self._pool.shutdown(wait=False)

    def _forget(self, watch: Any) -> None:  # noqa: ANN401 -- the package's iterator
        watch.close()
        with self._watching:
            self._watches.discard(watch)
            self._n_watching -= 1


class GrpcHealth:
    """What a server says of itself and of its services. Any thread.

    The server as a whole, which is asked for by an empty name, serves until `close`. A service that was never reported
    is not known: NOT_FOUND for `Check`, SERVICE_UNKNOWN for `Watch`.
    """

    def __init__(self) -> None:
        self._servicer = _BoundedServicer()
        self._reported: dict[str, bool] = {}
        self.report(health.SERVICE_NAME, is_serving=True)

    def join(self, server: grpc.Server) -> None:
        """Serve on this server, which has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def report(self, service: str, *, is_serving: bool) -> None:
        """Say whether a service takes data; who watches it learns of a change."""
        if self._reported.get(service) is not is_serving:
            self._reported[service] = is_serving
            self._servicer.set(service, _STATUS.SERVING if is_serving else _STATUS.NOT_SERVING)

    def close(self) -> None:
        """Say that nothing is served any more, and end every watch."""
        self._servicer.close()
