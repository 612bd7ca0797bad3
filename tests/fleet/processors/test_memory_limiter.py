"""``memory_limiter``: refuses over the soft limit, takes again below it, and loses nothing."""

import asyncio
import subprocess
import sys

import pytest

from ingero.config import parse_model
from ingero.errors import ConfigError, RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.memory_limiter import (
    MemoryLimiter,
    MemoryLimiterConfig,
    read_total_bytes,
)
from ingero.otlp.codec import build_gauge, build_metrics, build_number
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_S

MIB = 1 << 20
GIB = 1 << 30


def _batch():
    gauge = build_gauge("m", [build_number(1.0, 1), build_number(2.0, 1)])
    return Batch(Signal.METRICS, build_metrics({}, [gauge], "t"), 1)


def test_batches_are_refused_while_memory_is_short_and_taken_again_after():
    host, following, resident = ManualHost(), KeptBatches(), [0]
    config = parse_model(
        MemoryLimiterConfig, {"limit_mib": 100, "spike_limit_mib": 20, "check_interval": "2s"}
    )
    limiter = MemoryLimiter(
        ComponentId("memory_limiter"),
        config,
        Signal.METRICS,
        following,
        read_resident=lambda: resident[0],
    )
    asyncio.run(limiter.start(host))
    limiter.consume(_batch())
    resident[0] = 80 * MIB + 1
    limiter.consume(_batch())
    host.advance(2 * NS_PER_S)
    with pytest.raises(RetryableError) as caught:
        limiter.consume(_batch())
    assert caught.value.retry_after_ns == 2 * NS_PER_S
    assert host.read("otelcol_processor_refused_items_total", processor="memory_limiter") == 2
    assert host.read("ingero_fleet_memory_limited", processor="memory_limiter") == 1
    resident[0] = 80 * MIB
    host.advance(2 * NS_PER_S)
    limiter.consume(_batch())
    assert len(following.batches) == 3
    assert host.read("ingero_fleet_memory_limited", processor="memory_limiter") == 0


@pytest.mark.parametrize(
    ("settings", "hard", "soft"),
    [
        ({"limit_mib": 1000}, 1000 * MIB, 800 * MIB),
        ({"limit_mib": 1000, "spike_limit_mib": 100}, 1000 * MIB, 900 * MIB),
        ({"limit_percentage": 50}, 5 * GIB, 4 * GIB),
        ({"limit_percentage": 50, "spike_limit_percentage": 20}, 5 * GIB, 3 * GIB),
        ({"limit_mib": 1000, "limit_percentage": 1}, 1000 * MIB, 800 * MIB),
        ({}, 8 * GIB, 8 * GIB - 8 * GIB // 5),
    ],
)
def test_limits_are_what_the_keys_say(settings, hard, soft):
    assert parse_model(MemoryLimiterConfig, settings).limits_bytes(10 * GIB) == (hard, soft)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_mib": 10, "spike_limit_mib": 10},
        {"limit_percentage": 10, "spike_limit_percentage": 10},
        {"limit_percentage": 101},
        {"check_interval": "0s"},
    ],
)
def test_limits_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        parse_model(MemoryLimiterConfig, settings)


GROW = f"""
from ingero.fleet.processors.memory_limiter import read_resident_bytes
before = read_resident_bytes()
held = bytearray({64 * MIB})
print(read_resident_bytes() - before)
"""


def test_resident_memory_follows_what_is_allocated():
    """In a process of its own: one that has run other tests has free memory, which grows nothing."""
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    assert 48 * MIB < int(done.stdout) < 128 * MIB
    assert read_total_bytes() > 64 * MIB


def test_garbage_is_collected_above_the_hard_limit_before_anything_is_refused():
    readings = [101 * MIB, 10 * MIB]
    config = parse_model(MemoryLimiterConfig, {"limit_mib": 100})
    following = KeptBatches()
    limiter = MemoryLimiter(
        ComponentId("memory_limiter"),
        config,
        Signal.METRICS,
        following,
        read_resident=lambda: readings.pop(0),
    )
    asyncio.run(limiter.start(ManualHost()))
    limiter.consume(_batch())
    assert (len(following.batches), readings) == (1, [])
