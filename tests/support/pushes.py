"""A healthy node's push, for tests that ask what becomes of any push."""

from ingero.agent.health.push_body import PushStatus
from ingero.agent.health.signals.machine import State
from ingero.agent.health.signals.reading import Signals
from ingero.wire.names import DetectionMode


def build_status(*, score: float = 0.94, wall_ns: int = 1) -> PushStatus:
    """What the node says of itself, judged by Fleet's threshold."""
    return PushStatus(
        score=score,
        shares=Signals(1.0, 0.9, 0.9, 0.9),
        state=State.ACTIVE,
        is_degraded=False,
        mode=DetectionMode.FLEET,
        is_reachable=True,
        cohort="",
        wall_ns=wall_ns,
    )
