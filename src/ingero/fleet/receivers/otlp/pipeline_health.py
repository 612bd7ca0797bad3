"""Which signals a receiver takes now, as its pipelines are: what gRPC's health service says of each OTLP service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.fleet.component import ComponentId, Host, parse_id
from ingero.fleet.receivers.otlp.grpc_health import GrpcHealth
from ingero.fleet.views import PipelineView, RefusalView, ServiceView
from ingero.otlp.names import GRPC_SERVICES, Signal
from ingero.units import NS_PER_MS

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
