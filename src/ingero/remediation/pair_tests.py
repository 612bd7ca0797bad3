"""A pair test: what is kept of it, what its times say, and what a policy makes of that. Pure values.

::

    begun ──► submitted ──► ended (with its outcome) ──► closed (nothing of it is left at the scheduler)
      └───────────────────────►
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor, sqrt
from statistics import median
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.remediation.confirm_config import PairTestConfig
from ingero.remediation.records import Moment
from ingero.units import NS_PER_S, format_duration

MIN_ROUNDS: Final = 4
"""Below it no pair of ratios leaves out five percent."""
Z_95: Final = 1.96
_SPACE: Final = "~"
"""What stands for white space in a job's comment."""


class PairTestState(StrEnum):
    """Where a pair test is."""

    BEGUN = "begun"
    """Written before the scheduler is asked; it may have the job."""
    SUBMITTED = "submitted"
    """The scheduler has the job."""
    ENDED = "ended"
    """Its outcome is known."""
    CLOSED = "closed"
    """The scheduler was asked to cancel what may be left of it, long enough after its end."""


class PairOutcome(StrEnum):
    """What a pair test says of the finding."""

    CONFIRMS = "confirms"
    CONTRADICTS = "contradicts"
    CANNOT_TELL = "cannot tell"
    CANCELLED = "cancelled"
    """It was not wanted any more before it said anything, so it was no try."""


ALIVE: Final = frozenset({PairTestState.BEGUN, PairTestState.SUBMITTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTestRecord:
    """One pair test.

    Attributes:
        test_id: Its id; part of the job's name.
        episode: The finding that it is to confirm.
        cluster_id: The cluster.
        suspect: The node of the finding, as the scheduler names it.
        peer: The healthy node; empty when there was none.
        partition: Where the job runs.
        state: Where it is.
        began: When it was written first.
        changed: When its state changed last.
        job: The scheduler's id of the job; empty while it is not known.
        outcome: What it says; None before its end.
        note: Why, for a person.
        times: Seconds of each round by node; empty when there are none.
    """

    test_id: str
    episode: str
    cluster_id: str
    suspect: str
    peer: str
    partition: str
    state: PairTestState
    began: Moment
    changed: Moment
    job: str = ""
    outcome: PairOutcome | None = None
    note: str = ""
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For people and programs; times of day in nanoseconds since the epoch."""
        return {
            "id": self.test_id,
            "episode": self.episode,
            "cluster_id": self.cluster_id,
            "suspect": self.suspect,
            "peer": self.peer,
            "partition": self.partition,
            "state": self.state.value,
            "began_unix_ns": self.began.wall_ns,
            "changed_unix_ns": self.changed.wall_ns,
            "job": self.job,
            "outcome": None if self.outcome is None else self.outcome.value,
            "note": self.note,
            "rounds_s": {node: list(times) for node, times in self.times.items()},
        }


@dataclass(frozen=True, slots=True)
class PairTimes:
    """What a test's command has printed.

    Attributes:
        rounds_s: Seconds of each round by node.
        exchanges_s: Seconds of each exchange between both.
        exchange_bytes: Bytes that one exchange moves, both ways together.
    """

    rounds_s: Mapping[str, tuple[float, ...]]
    exchanges_s: tuple[float, ...] = ()
    exchange_bytes: int = 0

    @property
    def says_exchange(self) -> str:
        """The rate between both, for a person; empty when it was not measured."""
        if not self.exchanges_s or not self.exchange_bytes:
            return ""
        return f"; {self.exchange_bytes / median(self.exchanges_s) / 1e6:.0f} MB/s between both"


def parse_times(text: str) -> PairTimes:
    """What a test's command has printed: JSON objects, with anything between them.

    Raises:
        BadDataError: An object is not as it should be, or there is none; the message ends with what was printed.
    """
    decoder, rounds, exchange = json.JSONDecoder(), {}, PairTimes({})
    plain = text.replace(_SPACE, " ")
    at = plain.find("{")
    try:
        while at >= 0:
            message, end = decoder.raw_decode(plain, at)
            if "node" in message:
                rounds[str(message["node"])] = _read_seconds(message["rounds_s"])
            elif "exchange_s" in message:
                exchange = PairTimes(
                    {}, _read_seconds(message["exchange_s"]), int(message["exchange_bytes"])
                )
            at = plain.find("{", end)
    except (ValueError, KeyError, TypeError) as error:
        raise BadDataError(f"the test printed no times: {_end_of(plain)!r} ({error!r})") from error
    if not rounds:
        raise BadDataError(f"the test printed no times: {_end_of(plain)!r}")
    return PairTimes(rounds, exchange.exchanges_s, exchange.exchange_bytes)


def _end_of(text: str) -> str:
    return text.strip()[-200:]


def _read_seconds(values: Sequence[float]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in values)
    if not all(0 < value < float("inf") for value in seconds):
        raise ValueError("a time is not above 0")
    return seconds


@dataclass(frozen=True, slots=True)
class PairRatio:
    """How many times longer one node takes than the other.

    Attributes:
        median: Of all pairs of rounds.
        low: Lower end of the interval that has the ratio with 95 percent.
        high: Its upper end.
    """

    median: float
    low: float
    high: float


def compare_rounds(suspect: Sequence[float], peer: Sequence[float]) -> PairRatio:
    """The ratio of two nodes' times from repeated rounds.

    Median and interval of the ratios of all pairs of rounds, which assumes no distribution and heeds single slow rounds
    little. Source: Hodges and Lehmann 1963; the interval as in Hollander and Wolfe, Nonparametric Statistical Methods,
    for the rank sum test, with the normal approximation of its quantile.

    Raises:
        BadDataError: A node has fewer rounds than four.
    """
    n, m = len(suspect), len(peer)
    if min(n, m) < MIN_ROUNDS:
        raise BadDataError(
            f"{n} rounds of the suspect and {m} of its peer are too few, wanted {MIN_ROUNDS}"
        )
    ratios = sorted(one / other for one in suspect for other in peer)
    out = max(1, floor(n * m / 2 - Z_95 * sqrt(n * m * (n + m + 1) / 12)))
    return PairRatio(median(ratios), ratios[out - 1], ratios[-out])


def judge_times(
    record: PairTestRecord, text: str, min_ratio: float
) -> tuple[PairOutcome, str, Mapping[str, Sequence[float]]]:
    """What a test that came to its end says, why, and the times that say so.

    It confirms when even the lower end of the ratio's interval is as much as wanted, and contradicts when even the
    upper end is not.
    """
    try:
        times = parse_times(text)
        suspect, peer = (times.rounds_s.get(one, ()) for one in (record.suspect, record.peer))
        ratio = compare_rounds(suspect, peer)
    except BadDataError as error:
        return PairOutcome.CANNOT_TELL, error.message, {}
    outcome = PairOutcome.CANNOT_TELL
    if ratio.low >= min_ratio:
        outcome = PairOutcome.CONFIRMS
    elif ratio.high < min_ratio:
        outcome = PairOutcome.CONTRADICTS
    description = (
        f"{record.suspect} takes {ratio.median:.2f} times as long as {record.peer}"
        f" ({ratio.low:.2f} to {ratio.high:.2f}){times.says_exchange}"
    )
    return outcome, description, times.rounds_s


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the tests of an episode mean for an action.

    Attributes:
        description: Why, for a person.
        outcome: Where it is; a change of it is worth an entry.
        lets: Whether the action may go on.
        wants_test: Whether another test should be begun, once nothing else stops the action.
    """

    description: str
    outcome: str
    lets: bool = False
    wants_test: bool = False


def judge_confirmation(
    config: PairTestConfig, episode: str, tests: Iterable[PairTestRecord], now: Moment
) -> Confirmation:
    """What the tests of an episode, oldest first, mean for an action on its node."""
    own = [
        one for one in tests if one.episode == episode and one.outcome is not PairOutcome.CANCELLED
    ]
    if not own:
        return Confirmation("not tested yet", "untested", wants_test=True)
    last = own[-1]
    age_ns = now.since(last.changed)
    description = f"{last.note}, {format_duration(age_ns)} ago"
    if last.outcome is None:
        against = f"tests {last.suspect} against {last.peer} as {last.test_id}"
        return Confirmation(f"{against}: {last.note}", "running")
    if last.outcome is not PairOutcome.CANNOT_TELL:
        if age_ns >= config.valid_for:
            return Confirmation(f"too long ago: {description}", "outdated", wants_test=True)
        lets = last.outcome is PairOutcome.CONFIRMS
        words = f"{last.outcome}: {description}, wanted {config.min_ratio:.2f}"
        return Confirmation(words, last.outcome, lets=lets)
    unclear = [one for one in own if one.outcome is PairOutcome.CANNOT_TELL]
    outcome = f"cannot tell {len(unclear)}"
    if len(unclear) >= config.tries:
        lets = config.cannot_tell == "let"
        return Confirmation(f"cannot tell, {len(unclear)} tests: {description}", outcome, lets=lets)
    return Confirmation(
        f"cannot tell: {description}", outcome, wants_test=age_ns >= config.retry_after
    )


def name_job(record: PairTestRecord) -> str:
    """The name of its job."""
    return f"ingero-pair-{record.test_id}"


def is_overdue(config: PairTestConfig, record: PairTestRecord, now: Moment) -> bool:
    """Whether its job has neither ended nor been removed when it should have; a minute is the scheduler's."""
    limit_ns = config.max_wait + config.time_limit + 60 * NS_PER_S
    return now.since(record.began) >= limit_ns
