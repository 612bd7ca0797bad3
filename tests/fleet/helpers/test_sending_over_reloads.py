"""A batch under way when its exporter's stop times out: it is sent once, waits again, or is counted and said to be lost."""

import asyncio

import pytest
from tests.fleet.helpers.test_sending import (
    Destination,
    _batch,
    _end,
    _read,
    _run,
    _sender,
    _until,
    join_threads,
)

from ingero.errors import PermanentError, RetryableError
from ingero.fleet.helpers import sending
from ingero.fleet.helpers.sending_report import PATIENCE_NS
from ingero.fleet.helpers.waiting_batches import MemoryBatches
from ingero.telemetry.clock import SystemClock
from ingero.telemetry.log import read_fields
from ingero.units import NS_PER_S

AWAY = RetryableError("away")
GONE = "items lost: the exporter was changed or removed before the destination took them"


def shut(*answers):
    """A destination that takes requests and does not answer yet."""
    destination = Destination(answers)
    destination.open.clear()
    return destination


async def stop_in_vain(sender):
    """As the service does when the time for a stop has passed."""
    stopping = asyncio.create_task(sender.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping


async def leave_under_way(host, destination, n_batches=1, n_under_way=1, **queue):
    """Start an exporter, let its threads send, and stop it before its destination answers."""
    sender = _sender(destination, queue)
    sender.start(host)
    for number in range(n_batches):
        sender.consume(_batch(number))
    await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == n_under_way)
    await stop_in_vain(sender)
    return sender


def forget_queue(host):
    """As the service does when the exporter's settings changed and the new ones started."""
    queue = host._shared.pop(("otlphttp", "sending_queue"))
    assert isinstance(queue, MemoryBatches)
    queue.discard()
    return queue


def test_what_the_destination_takes_late_is_sent_once_and_counted():
    slow, second = shut(), Destination()

    async def scenario(host):
        await leave_under_way(host, slow, 3, 3)
        after = _sender(second)
        after.start(host)
        slow.open.set()
        await _until(lambda: _read(host, "sent") == 6)
        await _end(after, host)

    host, _ = _run(scenario)
    assert (sorted(slow.taken), second.attempts) == ([0, 1, 2], 0)
    assert (_read(host, "sent"), _read(host, "send_failed")) == (6, 0)


def test_what_the_destination_refuses_late_is_sent_by_the_next_exporter_without_another_push():
    slow, second = shut(AWAY, AWAY, AWAY), Destination()

    async def scenario(host):
        await leave_under_way(host, slow, 3, 3)
        after = _sender(second)
        after.start(host)
        slow.open.set()
        await asyncio.to_thread(second.wait_until, lambda one: len(one.taken) == 3)
        await _end(after, host)

    host, _ = _run(scenario)
    assert (slow.attempts, sorted(second.taken)) == (3, [0, 1, 2])
    assert (_read(host, "sent"), _read(host, "send_failed")) == (6, 0)


def test_one_consumer_keeps_the_order_over_a_reload():
    slow, second = shut(AWAY), Destination()

    async def scenario(host):
        await leave_under_way(host, slow, 3, 1, num_consumers=1)
        after = _sender(second, {"num_consumers": 1})
        after.start(host)
        after.consume(_batch(3))
        await asyncio.sleep(0.05)
        assert second.attempts == 0
        slow.open.set()
        await asyncio.to_thread(second.wait_until, lambda one: len(one.taken) == 4)
        await _end(after, host)

    _run(scenario)
    assert second.taken == [0, 1, 2, 3]


@pytest.mark.parametrize("n_consumers", [1, 2])
def test_requests_that_hang_since_before_a_reload_hold_up_the_next_exporter_for_ten_seconds(
    n_consumers,
):
    hanging, second = shut(), Destination()

    async def scenario(host):
        await leave_under_way(host, hanging, n_consumers, n_consumers, num_consumers=n_consumers)
        after = _sender(second, {"num_consumers": n_consumers})
        after.start(host)
        after.consume(_batch(8))
        host.clock.advance(PATIENCE_NS - 1)
        await asyncio.sleep(0.05)
        assert second.attempts == 0
        host.clock.advance(1)
        after.consume(_batch(9))
        await asyncio.to_thread(second.wait_until, lambda one: len(one.taken) == 2)
        assert sorted(second.taken) == [8, 9]
        hanging.open.set()
        await _end(after, host)

    host, _ = _run(scenario)
    assert sorted(hanging.taken) == list(range(n_consumers))
    assert (_read(host, "sent"), _read(host, "send_failed")) == (2 * (n_consumers + 2), 0)


def test_the_next_exporter_goes_on_by_itself_when_it_has_waited_long_enough(monkeypatch):
    monkeypatch.setattr(sending, "PATIENCE_NS", NS_PER_S // 20)
    hanging, second = shut(), Destination()

    async def scenario(host):
        host.clock = SystemClock()
        await leave_under_way(host, hanging, num_consumers=1)
        after = _sender(second, {"num_consumers": 1})
        after.start(host)
        after.consume(_batch(1))
        await asyncio.to_thread(second.wait_until, lambda one: one.taken == [1])
        hanging.open.set()
        await _end(after, host)

    host, _ = _run(scenario)
    assert (_read(host, "sent"), _read(host, "send_failed")) == (4, 0)


def test_the_end_of_the_service_waits_for_what_an_exporter_before_a_reload_has_under_way():
    slow, second = shut(AWAY), Destination()

    async def scenario(host):
        await leave_under_way(host, slow)
        after = _sender(second)
        after.start(host)
        host.draining = True
        stopping = asyncio.create_task(after.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        slow.open.set()
        await asyncio.wait_for(stopping, 30)

    host, _ = _run(scenario)
    assert second.taken == [0]
    assert (_read(host, "sent"), _read(host, "send_failed")) == (2, 0)


def test_the_end_of_the_service_counts_what_an_exporter_before_a_reload_has_under_way(caplog):
    slow = shut()

    async def scenario(host):
        await leave_under_way(host, slow)
        after = _sender(Destination())
        after.start(host)
        host.draining = True
        await stop_in_vain(after)
        lost = _read(host, "send_failed")
        slow.open.set()
        await asyncio.to_thread(join_threads)
        return lost

    host, lost = _run(scenario)
    assert (lost, _read(host, "send_failed"), _read(host, "sent")) == (2, 2, 0)
    assert "did not take them before shutdown_timeout" in caplog.text


def test_under_changed_settings_what_waits_and_what_is_refused_late_is_counted_and_said(caplog):
    slow, second = shut(AWAY), Destination()

    async def scenario(host):
        await leave_under_way(host, slow, 4, 1, num_consumers=1)
        after = _sender(second)
        forget_queue(host)
        after.start(host)
        waiting = _read(host, "send_failed")
        slow.open.set()
        await asyncio.to_thread(join_threads)
        await _end(after, host)
        return waiting

    host, waiting = _run(scenario)
    assert (waiting, _read(host, "send_failed"), _read(host, "sent")) == (6, 8, 0)
    assert second.attempts == 0
    lines = [record for record in caplog.records if record.getMessage() == GONE]
    assert [read_fields(line)["items"] for line in lines] == [6, 2]


def test_under_changed_settings_what_the_destination_takes_late_is_not_lost():
    slow = shut(None, PermanentError("no"))

    async def scenario(host):
        await leave_under_way(host, slow, 2, 2)
        queue = forget_queue(host)
        slow.open.set()
        await asyncio.to_thread(join_threads)
        queue.end()

    host, _ = _run(scenario)
    assert (_read(host, "sent"), _read(host, "send_failed")) == (2, 2)


def test_a_forgotten_queue_counts_at_the_end_what_is_still_under_way(caplog):
    slow = shut(AWAY)

    async def scenario(host):
        await leave_under_way(host, slow)
        queue = forget_queue(host)
        before = _read(host, "send_failed")
        queue.end()
        after = _read(host, "send_failed")
        slow.open.set()
        await asyncio.to_thread(join_threads)
        return before, after

    host, lost = _run(scenario)
    assert (lost, _read(host, "send_failed")) == ((0, 2), 2)
    assert "did not take them before shutdown_timeout" in caplog.text


def test_an_exporter_whose_queue_was_forgotten_takes_no_push():
    async def scenario(host):
        sender = await leave_under_way(host, slow)
        forget_queue(host)
        with pytest.raises(RetryableError, match="queue is closed"):
            sender.consume(_batch(1))
        slow.open.set()

    slow = shut()
    _run(scenario)


def test_a_push_that_a_stopped_exporter_takes_is_sent_by_the_next():
    slow, second = shut(), Destination()

    async def scenario(host):
        before = await leave_under_way(host, slow)
        after = _sender(second)
        after.start(host)
        before.consume(_batch(7))
        await asyncio.to_thread(second.wait_until, lambda one: one.taken)
        slow.open.set()
        await _end(after, host)

    host, _ = _run(scenario)
    assert (second.taken, slow.taken) == ([7], [0])
    assert _read(host, "sent") == 4


def test_a_batch_that_waits_for_its_next_attempt_holds_up_no_other():
    never = {"initial_interval": "1h", "max_interval": "1h", "max_elapsed_time": "0s"}

    def deliver(batch):
        if batch.received_wall_ns == 0:
            raise AWAY
        taken.append(batch.received_wall_ns)

    taken = []

    async def scenario(host):
        sender = _sender(deliver, {"num_consumers": 2}, never)
        sender.start(host)
        sender.consume(_batch(0))
        await _until(lambda: sender.read_state().n_retries == 1)
        for number in (1, 2, 3):
            sender.consume(_batch(number))
            await _until(lambda number=number: taken[-1:] == [number])
            await asyncio.sleep(0.02)  # until its thread waits again
        await sender.stop()

    _run(scenario)
    assert taken == [1, 2, 3]
