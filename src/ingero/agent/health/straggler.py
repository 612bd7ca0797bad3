"""Whether the node is a straggler now: its score, the threshold that applies, and how long it has been under it."""

from __future__ import annotations

from typing import Final, NamedTuple

from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.signals.baseline import Baseline
from ingero.agent.health.signals.classify import Classifier
from ingero.agent.health.signals.machine import State
from ingero.agent.health.signals.reading import Reading, Signals
from ingero.agent.health.signals.score import compute_score
from ingero.agent.health.threshold_choice import (
    AppliedThreshold,
    ThresholdInputs,
    choose_threshold,
)
from ingero.wire.names import DetectionMode, DominantSignal

_FLEET_MODES: Final = frozenset({DetectionMode.FLEET, DetectionMode.FLEET_CACHED})


class Comparison(NamedTuple):
    """Result of comparing one sample with the threshold.

    Attributes:
        score: 0..1; None when nothing could be read.
        applied: Mode and threshold.
        dominant: What lost most against the node's own past.
        is_judged: There was a threshold to compare with, and the node is active.
        is_changed: This comparison made the node a straggler, or ended that.
    """

    score: float | None
    applied: AppliedThreshold
    dominant: DominantSignal
    is_judged: bool = False
    is_changed: bool = False


class StragglerDetector:
    """Compares the samples of one node. One thread calls it.

    Args:
        baseline: The node's own past; the loop folds into it.
        cache: The last threshold from Fleet.
        settings: Of the loop.
    """

    def __init__(self, baseline: Baseline, cache: ThresholdCache, settings: LoopSettings) -> None:
        self._baseline = baseline
        self._cache = cache
        self._settings = settings
        self._classifier = Classifier(settings.classifier)
        self._under_since_ns: int | None = None

    @property
    def is_straggler(self) -> bool:
        """The last verdict; it stands while nothing can be judged."""
        return self._classifier.is_straggler

    @property
    def is_suspect(self) -> bool:
        """A straggler, or under the threshold for a while: its samples do not belong in the baseline."""
        return self._classifier.is_suspect

    @property
    def is_warm(self) -> bool:
        """The baseline has seen as many intervals as calibration takes: worth keeping, and worth judging by."""
        return self._baseline.n_samples >= max(self._settings.machine.warmup, 1)

    def clear(self) -> None:
        """Forget the verdict: the workload that was judged is no longer there."""
        self._classifier.clear()
        self._under_since_ns = None

    def compare(
        self, seen: Reading | None, shares: Signals, state: State, now_ns: int, pause_ns: int
    ) -> Comparison:
        """Compare one sample.

        Args:
            seen: What was read; None when the node could not be read.
            shares: Its signals as shares.
            state: The node's state.
            now_ns: Monotonic time.
            pause_ns: How long Fleet asked the agent to wait.
        """
        is_scored = seen is not None and state is not State.STALE
        score = compute_score(shares, self._settings.score) if is_scored else None
        applied = self._choose_threshold(now_ns, pause_ns)
        if score is None or seen is None:
            return Comparison(None, applied, DominantSignal.UNKNOWN)
        dominant = self._baseline.dominant_signal(seen.signals)
        if state is not State.ACTIVE or applied.threshold is None:
            self._under_since_ns = None
            return Comparison(score, applied, dominant)
        may_accuse = self._is_settled(now_ns, applied)
        is_changed = self._classifier.classify(score, applied.threshold, may_accuse=may_accuse)
        if not self._classifier.is_suspect:
            self._under_since_ns = None
        elif self._under_since_ns is None:
            self._under_since_ns = now_ns
        return Comparison(score, applied, dominant, is_judged=True, is_changed=is_changed)

    def must_ask(self, pushed_ns: int, now_ns: int) -> bool:
        """Whether the node has been under the threshold for long enough, and was not pushed since: ask Fleet again."""
        if self._under_since_ns is None or self._classifier.is_straggler:
            return False
        return pushed_ns < self._under_since_ns + self._settings.peers_wait_ns <= now_ns

    def _is_settled(self, now_ns: int, applied: AppliedThreshold) -> bool:
        """Whether Fleet, where the threshold is its own, answered after the node had been under it for long enough."""
        wait_ns = self._settings.peers_wait_ns
        if not wait_ns or applied.mode not in _FLEET_MODES or not self._cache.is_reachable:
            return True
        answered_ns = self._cache.answered_ns
        return (
            self._under_since_ns is not None
            and answered_ns is not None
            and now_ns >= answered_ns >= self._under_since_ns + wait_ns
        )

    def _choose_threshold(self, now_ns: int, pause_ns: int) -> AppliedThreshold:
        inputs = ThresholdInputs(
            cached=self._cache.cached,
            is_reachable=self._cache.is_reachable,
            healthy_score=self._healthy_score(),
            mono_ns=now_ns,
            pause_ns=pause_ns,
        )
        return choose_threshold(inputs, self._settings.mode)

    def _healthy_score(self) -> float | None:
        """The score this node has when it is as usual; None before the baseline is warm."""
        if not self.is_warm:
            return None
        past = self._baseline.fast
        usual = past._replace(throughput=None if past.throughput is None else 1.0)
        return compute_score(usual, self._settings.score)
