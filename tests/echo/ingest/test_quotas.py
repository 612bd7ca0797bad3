"""What a bearer has written against what it may."""

import pytest

from ingero.config.acl import WriteQuota
from ingero.echo.ingest.quotas import BURST_NS, QuotaMeter
from ingero.serving.bearer import Principal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


def build_bearer(name="one", **quota):
    return Principal(name, name, None, quota=WriteQuota(**quota))


def test_a_bearer_without_a_quota_never_waits():
    meter, bearer = QuotaMeter(ManualClock()), build_bearer()
    meter.charge(bearer, n_rows=10**12, n_bytes=10**12)
    assert meter.find_wait(bearer) is None


@pytest.mark.parametrize("kind", ["rows", "bytes"])
def test_ten_seconds_at_once_and_then_the_mean(kind):
    clock = ManualClock()
    meter, bearer = QuotaMeter(clock), build_bearer(**{f"{kind}_per_second": 100})
    written = {f"n_{kind}": 250}
    for _ in range(4):
        assert meter.find_wait(bearer) is None
        meter.charge(bearer, **written)
    assert meter.find_wait(bearer) is None  # exactly the burst
    meter.charge(bearer, **written)
    assert meter.find_wait(bearer).wait_ns == 2.5 * NS_PER_S
    clock.advance(round(2.5 * NS_PER_S))
    assert meter.find_wait(bearer) is None


def test_over_an_hour_a_bearer_gets_its_quota_whatever_the_size_of_its_requests():
    clock = ManualClock()
    meter, bearer = QuotaMeter(clock), build_bearer(rows_per_second=100)
    n_rows = 0
    for second in range(3600):
        if not meter.find_wait(bearer):
            size = 1 + second * 7919 % 5000
            meter.charge(bearer, n_rows=size)
            n_rows += size
        clock.advance(NS_PER_S)
    assert 3600 * 100 <= n_rows <= 3600 * 100 + 100 * BURST_NS // NS_PER_S + 5000


def test_others_do_not_wait_for_it_and_silence_earns_no_more_than_the_burst():
    clock = ManualClock()
    meter = QuotaMeter(clock)
    one, two = build_bearer("one", rows_per_second=10), build_bearer("two", rows_per_second=10)
    meter.charge(one, n_rows=1000)
    assert meter.find_wait(one).wait_ns == 90 * NS_PER_S
    assert meter.find_wait(two) is None
    clock.advance(10_000 * NS_PER_S)
    meter.charge(one, n_rows=101)
    assert meter.find_wait(one).wait_ns == NS_PER_S // 10


def test_the_stricter_of_two_limits_counts():
    meter = QuotaMeter(ManualClock())
    bearer = build_bearer(rows_per_second=1000, bytes_per_second=10)
    meter.charge(bearer, n_rows=1, n_bytes=150)
    assert meter.find_wait(bearer).wait_ns == 5 * NS_PER_S


@pytest.mark.parametrize("kind", ["rows", "bytes"])
def test_a_changed_quota_counts_at_once_also_for_what_is_owed(kind):
    clock = ManualClock()
    meter = QuotaMeter(clock)
    few, many = (build_bearer(**{f"{kind}_per_second": limit}) for limit in (10, 1000))
    meter.charge(few, **{f"n_{kind}": 100_100})
    assert meter.find_wait(few).wait_ns == 10_000 * NS_PER_S
    assert meter.find_wait(many).wait_ns == 100 * NS_PER_S
    assert meter.find_wait(build_bearer()) is None
    other = {"rows": "bytes", "bytes": "rows"}[kind]
    assert meter.find_wait(build_bearer(**{f"{other}_per_second": 1})) is None
    clock.advance(40 * NS_PER_S)
    meter.charge(many, **{f"n_{kind}": 1000})
    assert meter.find_wait(many).wait_ns == (100 - 0.4 + 1) * NS_PER_S
    clock.advance(60 * NS_PER_S)
    assert meter.find_wait(many).wait_ns == 40.6 * NS_PER_S
    assert meter.find_wait(few).wait_ns == 4060 * NS_PER_S
