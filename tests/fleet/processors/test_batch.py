"""``batch``: joins, cuts, waits no longer than it may, and keeps what nobody takes."""

import asyncio

import pytest

from ingero.config import parse_model
from ingero.errors import ConfigError, PermanentError, RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.batch import BatchConfig, BatchProcessor
from ingero.otlp.codec import build_gauge, build_metrics, build_number, iter_points
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost


class Following:
    def __init__(self):
        self.batches, self.errors = [], []
        self.taken = asyncio.Event()

    def consume(self, batch):
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.batches.append(batch)
        self.taken.set()

    @property
    def sizes(self):
        return [batch.export.n_items for batch in self.batches]


def _batch(*values):
    points = [build_number(float(value), 1) for value in values]
    return Batch(Signal.METRICS, build_metrics({}, [build_gauge("m", points)], "t"), 1)


def _run(settings, scenario):
    host, following = ManualHost(), None

    async def run():
        nonlocal following
        following = Following()
        config = parse_model(BatchConfig, settings)
        processor = BatchProcessor(ComponentId("batch"), config, Signal.METRICS, following)
        await processor.start(host)
        await scenario(processor, following)
        await processor.stop()

    asyncio.run(run())
    return host, following


def test_waiting_items_go_out_together_when_there_are_enough_and_in_order():
    async def scenario(processor, following):
        for value in range(5):
            processor.consume(_batch(value))
        assert following.sizes == [3]

    host, following = _run({"send_batch_size": 3, "timeout": "1h"}, scenario)
    assert following.sizes == [3, 2]
    values = [point.value for batch in following.batches for point in iter_points(batch.export)]
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]
    name = "otelcol_processor_batch_sends_total"
    assert host.read(name, processor="batch", trigger="size") == 1
    assert host.read(name, processor="batch", trigger="stop") == 1


def test_large_batches_are_cut_to_the_maximum():
    async def scenario(processor, following):
        processor.consume(_batch(*range(10)))
        assert following.sizes == [4, 4, 2]

    _run({"send_batch_size": 3, "send_batch_max_size": 4, "timeout": "1h"}, scenario)


def test_timeout_sends_what_there_is():
    async def scenario(processor, following):
        processor.consume(_batch(1))
        assert following.sizes == []
        await following.taken.wait()
        assert following.sizes == [1]

    host, _ = _run({"send_batch_size": 100, "timeout": "1ms"}, scenario)
    sends = "otelcol_processor_batch_sends_total"
    assert host.read(sends, processor="batch", trigger="timeout") == 1


def test_no_timeout_sends_at_once():
    async def scenario(processor, following):
        processor.consume(_batch(1))
        assert following.sizes == [1]

    _run({"send_batch_size": 100, "timeout": "0s"}, scenario)


def test_what_is_refused_for_now_stays_and_is_tried_again_and_new_data_waits_outside():
    async def scenario(processor, following):
        following.errors = [RetryableError("later")] * 2
        processor.consume(_batch(1, 2))
        processor.consume(_batch(3, 4))
        with pytest.raises(RetryableError):
            processor.consume(_batch(5))
        assert following.batches == []
        await following.taken.wait()

    host, following = _run({"send_batch_size": 2, "timeout": "1ms"}, scenario)
    assert sorted(
        point.value for batch in following.batches for point in iter_points(batch.export)
    ) == [1.0, 2.0, 3.0, 4.0]
    assert host.read("ingero_fleet_batch_dropped_items_total", processor="batch") == 0


def test_what_is_refused_for_good_is_counted_and_does_not_stop_the_rest():
    async def scenario(processor, following):
        following.errors = [PermanentError("no")]
        processor.consume(_batch(1, 2, 3, 4))

    host, following = _run(
        {"send_batch_size": 2, "send_batch_max_size": 2, "timeout": "1h"}, scenario
    )
    assert following.sizes == [2]
    assert host.read("ingero_fleet_batch_dropped_items_total", processor="batch") == 2


def test_what_nobody_takes_at_the_end_is_counted():
    async def scenario(processor, following):
        following.errors = [RetryableError("later")] * 100
        processor.consume(_batch(1, 2, 3))

    host, following = _run({"send_batch_size": 100, "timeout": "1h"}, scenario)
    assert following.batches == []
    assert host.read("ingero_fleet_batch_dropped_items_total", processor="batch") == 3


def test_maximum_below_the_size_is_refused():
    with pytest.raises(ConfigError, match="below send_batch_size"):
        parse_model(BatchConfig, {"send_batch_size": 10, "send_batch_max_size": 5})
