"""Which threshold counts now, and where it came from: Fleet, a cached value, or the node's own past.

Pure. A Fleet that does not answer never stops classification: the mode goes ``fleet → fleet-cached → local-cached →
local-baseline → none`` and back by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ingero.units import NS_PER_S
from ingero.wire.names import DetectionMode

FRESH_FLOOR_NS: Final = 20 * NS_PER_S
CACHED_MAX_AGE_NS: Final = 300 * NS_PER_S
LOCAL_FACTOR: Final = 0.85


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """Ages and the local rule.

    Attributes:
        fresh_max_age_ns: A value with quorum is ``fleet`` up to this age. See `fresh_max_age`.
        cached_max_age_ns: A value is used as cached up to this age.
        local_factor: Share of the node's own healthy score that is the threshold without Fleet.
        holds_while_reachable: A value with quorum that went stale while Fleet answers counts as ``fleet-cached``;
            False is the existing agent's behaviour, which stops classifying.
    """

    fresh_max_age_ns: int = FRESH_FLOOR_NS
    cached_max_age_ns: int = CACHED_MAX_AGE_NS
    local_factor: float = LOCAL_FACTOR
    holds_while_reachable: bool = True


class CachedThreshold(NamedTuple):
    """The last threshold that Fleet sent.

    Attributes:
        value: The threshold; None when Fleet withholds it, so that no node judges itself now.
        quorum_met: Whether enough nodes voted for it.
        mono_ns: When it arrived.
    """

    value: float | None
    quorum_met: bool
    mono_ns: int


class ThresholdInputs(NamedTuple):
    """What is known when the mode is chosen.

    Attributes:
        cached: Fleet's last threshold, or None.
        is_reachable: Fewer than three pushes in a row failed.
        healthy_score: The score the node's own baseline would have, or None while it is not warm.
        mono_ns: Now.
        pause_ns: How long Fleet asked the agent to wait; a value stays fresh for that much longer.
    """

    cached: CachedThreshold | None
    is_reachable: bool
    healthy_score: float | None
    mono_ns: int
    pause_ns: int = 0


class AppliedThreshold(NamedTuple):
    """The mode and its threshold; None means that nothing can be judged."""

    mode: DetectionMode
    threshold: float | None


def fresh_max_age(push_interval_ns: int) -> int:
    """How old a value with quorum may be: two and a half push intervals, at least 20 s."""
    return max(FRESH_FLOOR_NS, push_interval_ns * 5 // 2)


def choose_threshold(inputs: ThresholdInputs, settings: ModeSettings) -> AppliedThreshold:
    """Choose the threshold; the first rule that applies wins.

    1. quorum, fresh → ``fleet``; 2. no quorum, at most 5 min → ``fleet-cached``; 3. unreachable, at most 5 min →
    ``local-cached``; 4. reachable, at most 5 min → ``fleet-cached``; 5. unreachable and warm → ``local-baseline``;
    6. ``none``. Where Fleet withheld the threshold the mode is ``none`` for 5 min, reachable or not: most nodes
    fell together, so being under an older threshold or the node's own says nothing about this node.
    """
    cached = inputs.cached
    if cached is not None:
        # A poll that ended after this sample began is as fresh as can be, not from the future.
        age_ns = max(inputs.mono_ns - cached.mono_ns - inputs.pause_ns, 0)
        mode = _cached_mode(cached.quorum_met, age_ns, inputs.is_reachable, settings)
        if mode is not None:
            return AppliedThreshold(
                DetectionMode.NONE if cached.value is None else mode, cached.value
            )
    if not inputs.is_reachable and inputs.healthy_score is not None:
        return AppliedThreshold(
            DetectionMode.LOCAL_BASELINE, settings.local_factor * inputs.healthy_score
        )
    return AppliedThreshold(DetectionMode.NONE, None)


def _cached_mode(
    quorum_met: bool,  # noqa: FBT001 - a fact about the value, not a switch
    age_ns: int,
    is_reachable: bool,  # noqa: FBT001
    settings: ModeSettings,
) -> DetectionMode | None:
    if quorum_met and age_ns <= settings.fresh_max_age_ns:
        return DetectionMode.FLEET
    if age_ns > settings.cached_max_age_ns:
        return None
    if not quorum_met:
        return DetectionMode.FLEET_CACHED
    if not is_reachable:
        return DetectionMode.LOCAL_CACHED
    return DetectionMode.FLEET_CACHED if settings.holds_while_reachable else None
