"""Queue and retry: what is accepted is delivered or counted, whatever the destination does."""

import asyncio
import threading

import pytest

from ingero.config import parse_model
from ingero.errors import PermanentError, RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.fleet.helpers.sending import Sender
from ingero.fleet.helpers.sending_report import PATIENCE_NS
from ingero.fleet.views import DeliveryState
from ingero.otlp.codec import build_gauge, build_metrics, build_number
from ingero.otlp.names import Signal
from ingero.telemetry.log import read_fields
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S

FAST = {"initial_interval": "1ms", "max_interval": "2ms"}


class Destination:
    """Answers each attempt as told, then takes everything; can be made to wait."""

    def __init__(self, answers=()):
        self.answers = list(answers)
        self.taken, self.attempts = [], 0
        self.changed = threading.Condition()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, batch):
        with self.changed:
            self.attempts += 1
            answer = self.answers.pop(0) if self.answers else None
            self.changed.notify_all()
        self.open.wait()
        if answer is not None:
            raise answer
        with self.changed:
            self.taken.append(batch.received_wall_ns)
            self.changed.notify_all()

    def wait_until(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), 30)


def _batch(number=1, n_points=2):
    points = [build_number(1.0, 1) for _ in range(n_points)]
    return Batch(Signal.METRICS, build_metrics({}, [build_gauge("m", points)], "t"), number)


def _sender(destination, queue=None, retry=None):
    return Sender(
        ComponentId("otlphttp"),
        destination,
        parse_model(QueueConfig, queue or {}),
        parse_model(RetryConfig, {**FAST, **(retry or {})}),
    )


def _read(host, name):
    return host.read(f"otelcol_exporter_{name}_metric_points_total", exporter="otlphttp")


def _run(scenario):
    host = ManualHost()
    return host, asyncio.run(scenario(host))


def join_threads():
    """Wait for every thread that sends to end."""
    for thread in threading.enumerate():
        if thread.name.startswith("send-otlphttp"):
            thread.join()


async def _end(sender, host):
    host.draining = True
    await sender.stop()


def test_everything_accepted_is_delivered_before_stop_returns():
    destination = Destination()

    async def scenario(host):
        sender = _sender(destination)
        sender.start(host)
        for number in range(200):
            sender.consume(_batch(number))
        await _end(sender, host)

    host, _ = _run(scenario)
    assert sorted(destination.taken) == list(range(200))
    assert _read(host, "sent") == 400
    assert _read(host, "send_failed") == 0


def test_retryable_refusals_are_tried_again_until_taken():
    destination = Destination([RetryableError("later")] * 3)

    async def scenario(host):
        sender = _sender(destination)
        sender.start(host)
        sender.consume(_batch(7))
        await asyncio.to_thread(destination.wait_until, lambda one: one.taken)
        await _end(sender, host)

    host, _ = _run(scenario)
    assert (destination.attempts, destination.taken) == (4, [7])
    assert host.read("ingero_fleet_exporter_retries_total", exporter="otlphttp") == 3


def test_permanent_refusal_is_counted_and_never_tried_again():
    destination = Destination([PermanentError("no")])

    async def scenario(host):
        sender = _sender(destination)
        sender.start(host)
        sender.consume(_batch(1))
        sender.consume(_batch(2))
        await _end(sender, host)

    host, _ = _run(scenario)
    assert (destination.attempts, len(destination.taken)) == (2, 1)
    assert _read(host, "send_failed") == 2


def test_a_batch_that_meets_a_defect_is_counted_as_lost_and_the_thread_goes_on(caplog):
    secret = "SECRET"
    destination = Destination([ValueError(f"illegal header {secret}")])

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1})
        sender.start(host)
        sender.consume(_batch(1))
        sender.consume(_batch(2))
        await _end(sender, host)
        return sender.read_state()

    host, state = _run(scenario)
    assert destination.taken == [2]
    assert (_read(host, "send_failed"), _read(host, "sent")) == (2, 2)
    assert "unexpected ValueError at test_sending.py:" in state.last_error
    fields = [read_fields(record) for record in caplog.records]
    assert [one["items"] for one in fields if "ValueError" in str(one.get("error"))] == [2]
    assert secret not in f"{state} {fields} {caplog.text}"


def test_full_queue_refuses_so_that_the_pusher_keeps_the_data():
    destination = Destination()
    destination.open.clear()

    async def scenario(host):
        sender = _sender(destination, {"queue_size": 2, "num_consumers": 1})
        sender.start(host)
        sender.consume(_batch(0))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == 1)
        sender.consume(_batch(1))
        sender.consume(_batch(2))
        assert host.read("otelcol_exporter_queue_size", exporter="otlphttp") == 2
        with pytest.raises(RetryableError, match="queue is full"):
            sender.consume(_batch(3))
        destination.open.set()
        await _end(sender, host)

    host, _ = _run(scenario)
    assert sorted(destination.taken) == [0, 1, 2]
    assert _read(host, "send_failed") == 0
    assert host.read("otelcol_exporter_queue_capacity", exporter="otlphttp") == 2


def test_full_queue_makes_pushers_wait_until_its_destination_was_away_for_long():
    destination = Destination([RetryableError("away")] * 1_000)

    async def scenario(host):
        sender = _sender(
            destination,
            {"queue_size": 1, "num_consumers": 1},
            {"initial_interval": "1h", "max_interval": "1h", "max_elapsed_time": "0s"},
        )
        sender.start(host)
        assert sender.find_refusal() is None
        sender.consume(_batch(0))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == 1)
        sender.consume(_batch(1))
        assert isinstance(sender.find_refusal(), RetryableError)
        while sender._report._away_since_ns is None:  # noqa: ASYNC110 - the thread notes it after the attempt
            await asyncio.sleep(0)
        host.clock.advance(PATIENCE_NS)
        assert isinstance(sender.find_refusal(), RetryableError)
        host.clock.advance(1)
        assert sender.find_refusal() is None  # others go on without it
        with pytest.raises(RetryableError):
            sender.consume(_batch(2))
        destination.answers.clear()
        await _end(sender, host)

    _run(scenario)
    assert destination.taken == [0, 1]


def test_no_more_than_num_consumers_send_at_once():
    destination = Destination()
    destination.open.clear()

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 3})
        sender.start(host)
        for number in range(10):
            sender.consume(_batch(number))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == 3)
        before = destination.attempts
        destination.open.set()
        await _end(sender, host)
        return before

    _, before = _run(scenario)
    assert before == 3
    assert len(destination.taken) == 10


def test_retries_end_after_max_elapsed_time_and_the_loss_is_counted():
    destination = Destination([RetryableError("later", retry_after_ns=2 * NS_PER_S)])

    async def scenario(host):
        sender = _sender(destination, retry={"max_elapsed_time": "1s"})
        sender.start(host)
        sender.consume(_batch())
        await _end(sender, host)

    host, _ = _run(scenario)
    assert destination.attempts == 1
    assert _read(host, "send_failed") == 2


def test_retries_can_be_off():
    destination = Destination([RetryableError("later")])

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1}, {"enabled": False})
        sender.start(host)
        sender.consume(_batch(1))
        sender.consume(_batch(2))
        await asyncio.to_thread(destination.wait_until, lambda one: one.taken)
        before = list(destination.taken)
        await _end(sender, host)
        return before

    host, before = _run(scenario)
    assert (before, destination.attempts) == ([2], 2)
    assert _read(host, "send_failed") == 2


def test_waits_grow_by_the_multiplier_within_their_spread_and_respect_the_destination():
    sender = _sender(
        Destination(),
        retry={"initial_interval": "1s", "randomization_factor": 0.25, "max_interval": "10s"},
    )
    waits = [sender._next_wait(4.0 * NS_PER_S, RetryableError("x")) for _ in range(200)]
    assert min(waits) >= 3 * NS_PER_S
    assert max(waits) <= 5 * NS_PER_S
    assert max(waits) - min(waits) > NS_PER_S
    asked = RetryableError("x", retry_after_ns=60 * NS_PER_S)
    assert sender._next_wait(4.0 * NS_PER_S, asked) == 60 * NS_PER_S
    exact = _sender(Destination(), retry={"randomization_factor": 0})
    assert exact._next_wait(4.0, RetryableError("x")) == 4.0


def test_without_a_queue_the_caller_hears_the_destination():
    destination = Destination([RetryableError("later"), PermanentError("no")])

    async def scenario(host):
        sender = _sender(destination, {"enabled": False})
        sender.start(host)
        with pytest.raises(RetryableError):
            sender.consume(_batch(1))
        with pytest.raises(PermanentError):
            sender.consume(_batch(2))
        sender.consume(_batch(3))
        assert destination.taken == [3]
        await _end(sender, host)

    _run(scenario)


def test_state_says_what_was_sent_retried_dropped_and_said_last():
    destination = Destination([RetryableError("later"), None, PermanentError("no"), None])

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1, "queue_size": 7})
        sender.start(host)
        before = sender.read_state()
        sender.consume(_batch(1))
        await asyncio.to_thread(destination.wait_until, lambda one: one.taken == [1])
        sender.consume(_batch(2))
        await _until(lambda: sender.read_state().refused_s is not None)
        host.clock.advance(3 * NS_PER_S)
        refused = sender.read_state()
        sender.consume(_batch(3))
        await _until(lambda: sender.read_state().n_sent == 4)
        after = sender.read_state()
        await _end(sender, host)
        return before, refused, after

    host, (before, refused, after) = _run(scenario)
    assert before == DeliveryState("otlphttp", 0, 7)
    assert (refused.n_sent, refused.n_retries, refused.n_dropped) == (2, 1, 2)
    assert (refused.away_s, refused.refused_s, refused.last_error) == (None, 3.0, "no")
    assert refused.last_error_unix_s == round(host.clock.wall_ns() / NS_PER_S - 3, 3)
    assert refused.trouble == "its destination has refused everything for 3.0 s: no"
    assert (after.refused_s, after.trouble, after.last_error) == (None, "", "no")


def test_a_destination_without_a_queue_is_seen_to_be_away_too():
    async def scenario(host):
        sender = _sender(Destination([RetryableError("later")]), {"enabled": False})
        sender.start(host)
        with pytest.raises(RetryableError):
            sender.consume(_batch(1))
        away = sender.read_state()
        sender.consume(_batch(2))
        back = sender.read_state()
        await _end(sender, host)
        return away, back

    _, (away, back) = _run(scenario)
    assert (away.capacity, away.away_s, away.n_dropped, away.last_error) == (0, 0.0, 2, "later")
    assert (back.away_s, back.n_sent) == (None, 2)


async def _until(check):
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.005)


def test_shutdown_tries_again_what_is_refused_for_now():
    destination = Destination([RetryableError("not yet")] * 4)

    async def scenario(host):
        sender = _sender(
            destination,
            {"num_consumers": 1},
            {"initial_interval": "1h", "max_interval": "1h", "max_elapsed_time": "0s"},
        )
        sender.start(host)
        for number in range(3):
            sender.consume(_batch(number))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == 1)
        await _end(sender, host)

    host, _ = _run(scenario)
    assert destination.taken == [0, 1, 2]
    assert (_read(host, "send_failed"), _read(host, "sent")) == (0, 6)


def test_shutdown_ends_at_its_deadline_and_counts_and_tells_what_is_left(caplog):
    destination = Destination([RetryableError("dead")] * 1_000_000)

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1}, {"max_elapsed_time": "0s"})
        sender.start(host)
        for number in range(3):
            sender.consume(_batch(number))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts >= 1)
        host.draining = True
        stopping = asyncio.create_task(sender.stop())
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts > 3)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await asyncio.to_thread(join_threads)

    host, _ = _run(scenario)
    assert _read(host, "send_failed") == 6
    assert "did not take them before shutdown_timeout" in caplog.text


def test_destination_that_is_away_is_one_log_line_until_it_is_back(caplog):
    caplog.set_level("INFO")
    destination = Destination([RetryableError("connection refused")])

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1})
        sender.start(host)
        for number in range(3):
            sender.consume(_batch(number))
        await asyncio.to_thread(destination.wait_until, lambda one: len(one.taken) == 3)
        await _end(sender, host)

    _run(scenario)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "destination does not take data; trying again"),
        ("INFO", "destination takes data again"),
    ]
    said = read_fields(caplog.records[0])
    assert (said["exporter"], said["error"]) == ("otlphttp", "connection refused")


def test_batches_refused_for_good_are_two_log_lines_at_most(caplog):
    destination = Destination([PermanentError("401 Unauthorized")] * 20)

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1})
        sender.start(host)
        for number in range(20):
            sender.consume(_batch(number))
        await _end(sender, host)

    host, _ = _run(scenario)
    assert len(caplog.records) == 2
    assert read_fields(caplog.records[0])["error"] == "401 Unauthorized"
    assert _read(host, "send_failed") == 40


def test_stop_that_is_cancelled_counts_once_what_waits_and_what_is_under_way(caplog):
    destination = Destination()
    destination.open.clear()

    async def scenario(host):
        sender = _sender(destination, {"num_consumers": 1})
        sender.start(host)
        sender.consume(_batch(0))
        await asyncio.to_thread(destination.wait_until, lambda one: one.attempts == 1)
        sender.consume(_batch(1))
        host.draining = True
        stopping = asyncio.create_task(sender.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        lost = _read(host, "send_failed")
        destination.open.set()
        await asyncio.to_thread(destination.wait_until, lambda one: one.taken)
        await asyncio.to_thread(join_threads)
        return lost

    host, lost = _run(scenario)
    assert (lost, _read(host, "send_failed"), _read(host, "sent")) == (4, 4, 0)
    (line,) = caplog.records
    assert line.getMessage() == (
        "items lost: the destination did not take them before shutdown_timeout"
    )
    assert read_fields(line) == {"exporter": "otlphttp", "items": 4}


def test_reload_hands_what_waits_to_the_next_exporter_of_that_name():
    away = Destination([RetryableError("away")] * 1000)
    back = Destination()

    async def scenario(host):
        first = _sender(
            away,
            {"num_consumers": 1},
            {"initial_interval": "1h", "max_interval": "1h", "max_elapsed_time": "0s"},
        )
        first.start(host)
        for number in range(5):
            first.consume(_batch(number))
        await asyncio.to_thread(away.wait_until, lambda one: one.attempts == 1)
        await first.stop()
        assert _read(host, "send_failed") == 0
        second = _sender(back)
        second.start(host)
        await asyncio.to_thread(back.wait_until, lambda one: len(one.taken) == 5)
        await _end(second, host)

    _run(scenario)
    assert sorted(back.taken) == [0, 1, 2, 3, 4]
