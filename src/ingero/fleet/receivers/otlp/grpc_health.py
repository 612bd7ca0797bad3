"""gRPC's health service beside OTLP, which Kubernetes' ``grpc`` probes and clients that balance load ask.

Open to everyone, as health is elsewhere. A client that never reads its watch holds up no other: what it does not take
waits for it, at most so much and for so long.

Source: grpc, doc/health-checking.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from ingero.fleet.component import ComponentId, Host, parse_id
from ingero.fleet.views import PipelineView, RefusalView, ServiceView
from ingero.otlp.names import GRPC_SERVICES, Signal
from ingero.serving.otlp.grpc_shared import ServiceCall, ServiceMethod
from ingero.units import NS_PER_MS

MAX_WATCHERS: Final = 64
_MAX_WAITING_BYTES: Final = 1024
_SERVICE: Final = "grpc.health.v1.Health"
_STATUS: Final = health_pb2.HealthCheckResponse
_OK, _INVALID_ARGUMENT, _NOT_FOUND, _RESOURCE_EXHAUSTED, _UNAVAILABLE = 0, 3, 5, 8, 14


class GrpcHealth:
    """What a server says of itself and of its services. One event loop owns it.

    The server as a whole, which is asked for by an empty name, serves until `close`. A service that was never reported
    is not known: NOT_FOUND for `Check`, SERVICE_UNKNOWN for `Watch`.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {"": _STATUS.SERVING, _SERVICE: _STATUS.SERVING}
        self._watches: defaultdict[str, set[ServiceCall]] = defaultdict(set)
        self._is_closed = False

    @property
    def methods(self) -> Mapping[bytes, ServiceMethod]:
        """The service's methods, by path."""
        return {
            f"/{_SERVICE}/Check".encode(): self._check,
            f"/{_SERVICE}/Watch".encode(): self._watch,
        }

    @property
    def n_watchers(self) -> int:
        """How many watch now."""
        return sum(map(len, self._watches.values()))

    def report(self, service: str, *, is_serving: bool) -> None:
        """Say whether a service takes data; who watches it learns of a change."""
        state = _STATUS.SERVING if is_serving else _STATUS.NOT_SERVING
        if not self._is_closed and self._states.get(service) != state:
            self._states[service] = state
            self._tell(service)

    def close(self) -> None:
        """Say that nothing is served any more, and end every watch."""
        self._is_closed = True
        for service in self._states:
            self._states[service] = _STATUS.NOT_SERVING
            self._tell(service)
        for call in [call for calls in self._watches.values() for call in calls]:
            call.end(_OK)

    def _tell(self, service: str) -> None:
        for call in list(self._watches.get(service, ())):
            if call.n_waiting_bytes > _MAX_WAITING_BYTES:
                call.end(_RESOURCE_EXHAUSTED, "the watch was not read")
            else:
                call.send(self._write(service))

    def _write(self, service: str) -> bytes:
        state = self._states.get(service, _STATUS.SERVICE_UNKNOWN)
        written: bytes = _STATUS(status=state).SerializeToString()
        return written

    def _check(self, call: ServiceCall, body: bytes) -> None:
        service = _read(call, body)
        if service is None:
            return
        if service not in self._states:
            call.end(_NOT_FOUND)
            return
        call.send(self._write(service))
        call.end(_OK)

    def _watch(self, call: ServiceCall, body: bytes) -> None:
        service = _read(call, body)
        if service is None:
            return
        if self._is_closed:
            call.end(_UNAVAILABLE, "shutting down")
            return
        if self.n_watchers >= MAX_WATCHERS:
            call.end(_RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already")
            return
        self._watches[service].add(call)
        call.on_end = lambda: self._forget(service, call)
        call.send(self._write(service))

    def _forget(self, service: str, call: ServiceCall) -> None:
        self._watches[service].discard(call)
        if not self._watches[service]:
            del self._watches[service]


def _read(call: ServiceCall, body: bytes) -> str | None:
    """The service that is asked for; None where the call was ended."""
    try:
        return str(health_pb2.HealthCheckRequest.FromString(body).service)
    except DecodeError:
        call.end(_INVALID_ARGUMENT, "no grpc.health.v1.HealthCheckRequest")
        return None


_INTERVAL_NS: Final = 500 * NS_PER_MS


class PipelineHealth:
    """Tells a health service, twice a second, which signals would be refused.

    A signal is refused when each of its pipelines has a component that takes nothing: memory is short, or the sending
    queue of a destination that works is full. A destination that is away refuses nothing, so health stays. The server
    as a whole serves until it ends: out of a load balancer, a full collector could not even answer with a threshold.

    Args:
        component: The receiver.
        host: The running service.
        health: What is set.
    """

    def __init__(self, component: ComponentId, host: Host, health: GrpcHealth) -> None:
        self._name = str(component)
        self._host = host
        self._health = health

    def start(self, outputs: Mapping[Signal, object], *, is_judged_here: bool) -> None:
        """Report every signal that a pipeline wants, and go on doing so.

        Args:
            outputs: The signals.
            is_judged_here: Whether pushes go through the pipelines of this process before they are answered.
        """
        for signal in outputs:
            self._health.report(GRPC_SERVICES[signal], is_serving=True)
        if is_judged_here and self._host.find(ServiceView):
            self._host.every(_INTERVAL_NS, lambda: self._report(outputs))

    def _report(self, outputs: Mapping[Signal, object]) -> None:
        (view,) = self._host.find(ServiceView)
        mine = [one for one in view.pipelines() if self._name in one.receivers]
        for signal in outputs:
            fed = [one for one in mine if one.name.partition("/")[0] == signal]
            takes = any(not self._is_refusing(one) for one in fed)
            self._health.report(GRPC_SERVICES[signal], is_serving=takes)

    def _is_refusing(self, pipeline: PipelineView) -> bool:
        for name in (*pipeline.processors, *pipeline.exporters):
            component = parse_id(name)
            for view in self._host.find(RefusalView, component) if component else ():
                if view.find_refusal() is not None:
                    return True
        return False
