"""Batches on disk: what was written is read in order, whatever else lies there."""

import asyncio
import os
import resource
import threading
from contextlib import contextmanager

import pytest
from tests.fleet.helpers.test_sending import join_threads

from ingero.config import parse_model
from ingero.errors import BadDataError, ConfigError, IngeroError, PermanentError, RetryableError
from ingero.fleet.component import BatchStorage, ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.extensions.file_storage import FACTORY, FileStorage, FileStorageConfig
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.fleet.helpers.sending import Sender
from ingero.otlp.codec import build_gauge, build_logs, build_metrics, build_number, encode_json
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
from ingero.testing.open_files import no_more_files
from ingero.testing.waiting import wait_until

NAME = ComponentId("file_storage")
LABELS = {"extension": "file_storage"}


@contextmanager
def storing(folder, **settings):
    """The extension, started; stopped at the end."""
    host = ManualHost()
    config = parse_model(FileStorageConfig, {"directory": str(folder), "timeout": "0s", **settings})
    extension = FileStorage(NAME, config)
    asyncio.run(extension.start(host))
    host._offers = [(kind, NAME, one) for kind, _, one in host._offers]
    try:
        yield host, extension
    finally:
        asyncio.run(extension.stop())


@pytest.mark.parametrize("fsync", [False, True])
def test_what_was_written_is_there_in_order_for_the_next_process_until_it_is_removed(
    tmp_path, fsync
):
    with storing(tmp_path / "a" / "b", fsync=fsync) as (_, extension):
        store = extension.open_store("exporters.otlp/up")
        keys = [store.write(b"%d" % number) for number in range(12)]
        store.remove(keys[0])
        store.remove(keys[0])
        (folder,) = (tmp_path / "a" / "b").iterdir()
        assert folder.name == "exporters.otlp%2Fup"
        (folder / "00000000000000000099.tmp").write_bytes(b"half")
    with storing(tmp_path / "a" / "b") as (_, extension):
        store = extension.open_store("exporters.otlp/up")
        assert [store.read(key) for key in store.list_keys()] == [b"%d" % n for n in range(1, 12)]
        assert store.write(b"more") > keys[-1]
        assert extension.open_store("exporters.otlp").list_keys() == []


def test_a_queue_has_one_process_at_a_time(tmp_path):
    with storing(tmp_path) as (_, extension):
        extension.open_store("x")
        with storing(tmp_path) as (_, other), pytest.raises(IngeroError, match="another process"):
            other.open_store("x")
    with storing(tmp_path) as (_, extension):
        extension.open_store("x")


@pytest.mark.parametrize("damage", [b"", b"IGS1\0\0\0\1", None])
def test_damaged_batch_is_set_aside_and_counted(tmp_path, damage):
    with storing(tmp_path) as (host, extension):
        store = extension.open_store("x")
        key = store.write(b"0123456789")
        place = tmp_path / "x" / f"{key:020d}"
        place.write_bytes(place.read_bytes()[:-1] + b"!" if damage is None else damage)
        with pytest.raises(BadDataError, match="checksum is wrong"):
            store.read(key)
        store.set_aside(key, "test")
        assert host.read("ingero_fleet_storage_damaged_batches_total", **LABELS) == 1
        assert sorted(one.name for one in place.parent.iterdir()) == [f"{key:020d}.damaged", "lock"]


def test_a_batch_that_is_gone_is_bad_and_one_that_cannot_be_read_for_now_is_not(tmp_path, caplog):
    with storing(tmp_path) as (host, extension):
        store = extension.open_store("x")
        keys = [store.write(b"one"), store.write(b"two")]
        (tmp_path / "x" / f"{keys[0]:020d}").unlink()
        with pytest.raises(BadDataError, match="No such file"):
            store.read(keys[0])
        with no_more_files(), pytest.raises(RetryableError, match="Too many open files"):
            store.read(keys[1])
        assert store.read(keys[1]) == b"two"
        assert host.read("ingero_fleet_storage_read_failures_total", **LABELS) == 1
        assert "Too many open files" in caplog.text


def test_what_the_disk_does_not_take_is_refused_for_now_and_leaves_nothing(tmp_path):
    with storing(tmp_path) as (host, extension):
        store = extension.open_store("x")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(RetryableError, match="File too large"):
                store.write(b"x" * 200_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert host.read("ingero_fleet_storage_write_failures_total", **LABELS) == 1
        assert [one.name for one in (tmp_path / "x").iterdir()] == ["lock"]
        assert store.read(store.write(b"small")) == b"small"


def test_keys_that_mean_nothing_here_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="nothing to compact"):
        parse_model(FileStorageConfig, {"compaction": {"on_start": True}})


def test_folder_that_cannot_be_used_is_named(tmp_path):
    for check in (FACTORY.check_files, start):
        with pytest.raises(IngeroError, match="no such folder"):
            check(
                parse_model(
                    FileStorageConfig, {"directory": str(tmp_path / "a"), "create_directory": False}
                )
            )
        (tmp_path / "file").touch()
        with pytest.raises(IngeroError, match="file"):
            check(parse_model(FileStorageConfig, {"directory": str(tmp_path / "file")}))


def start(config):
    asyncio.run(FileStorage(NAME, config).start(ManualHost()))


def test_modes_of_folders_are_those_of_the_settings(tmp_path):
    old = os.umask(0)
    try:
        with storing(tmp_path / "s", directory_permissions="0700") as (_, extension):
            extension.open_store("x")
    finally:
        os.umask(old)
    assert [one.stat().st_mode & 0o777 for one in (tmp_path / "s", tmp_path / "s" / "x")] == [
        0o700
    ] * 2


class Upstream:
    """Refuses for now until it is opened; keeps what it took."""

    def __init__(self, answer=RetryableError):
        self.answer = answer
        self.open = threading.Event()
        self.open.set()
        self.taken, self.changed = [], threading.Condition()

    def __call__(self, batch):
        self.open.wait()
        with self.changed:
            self.changed.notify_all()
            if self.answer is not None:
                raise self.answer("no")
            self.taken.append((batch.signal, batch.received_wall_ns, encode_json(batch.export)))


def metrics(number):
    export = build_metrics({"a": "b"}, [build_gauge("m", [build_number(float(number), 1)])], "t")
    return Batch(Signal.METRICS, export, number)


def sender(host, upstream, **queue):
    made = Sender(
        ComponentId("otlphttp", "up"),
        upstream,
        parse_model(QueueConfig, {"storage": "file_storage", "num_consumers": 1, **queue}),
        parse_model(RetryConfig, {"initial_interval": "1ms", "max_interval": "1ms"}),
    )
    made.start(host)
    return made


async def end(one, host):
    host.draining = True
    await asyncio.wait_for(one.stop(), 30)


def test_a_stopped_sender_leaves_what_its_destination_did_not_take_to_the_next(tmp_path):
    sent = [metrics(1), Batch(Signal.LOGS, build_logs({}, [], "t"), 2), metrics(3)]

    async def first(host):
        one = sender(host, Upstream())
        for batch in sent:
            one.consume(batch)
        await end(one, host)
        assert (
            host.read("otelcol_exporter_send_failed_metric_points_total", exporter="otlphttp/up")
            == 0
        )

    upstream = Upstream(None)

    async def second(host):
        await end(sender(host, upstream), host)

    for scenario in (first, second):
        with storing(tmp_path) as (host, _):
            asyncio.run(scenario(host))
    assert upstream.taken == [
        (one.signal, one.received_wall_ns, encode_json(one.export)) for one in sent
    ]
    assert [one.name for one in (tmp_path / "exporters.otlphttp%2Fup").iterdir()] == ["lock"]


def test_refused_and_damaged_batches_do_not_come_back(tmp_path):
    with storing(tmp_path) as (host, extension):
        store = extension.open_store("exporters.otlphttp/up")
        for stored in (b"", b"\x09" * 20, b"\x00" * 9 + b"\xff\xff"):
            store.write(stored)
    with storing(tmp_path) as (host, _):

        async def scenario():
            one = sender(host, Upstream(PermanentError))
            one.consume(metrics(1))
            await end(one, host)

        asyncio.run(scenario())
        assert host.read("ingero_fleet_storage_damaged_batches_total", **LABELS) == 3
        assert (
            host.read("otelcol_exporter_send_failed_metric_points_total", exporter="otlphttp/up")
            == 1
        )
    left = sorted(one.suffix for one in (tmp_path / "exporters.otlphttp%2Fup").iterdir())
    assert left == ["", ".damaged", ".damaged", ".damaged"]


def leave_batches(folder, count):
    """What a process leaves whose destination took nothing."""

    async def scenario(host):
        one = sender(host, Upstream())
        for number in range(count):
            one.consume(metrics(number))
        await end(one, host)

    with storing(folder) as (host, _):
        asyncio.run(scenario(host))


def test_a_queue_that_cannot_be_read_for_now_is_sent_in_order_once_it_can(tmp_path):
    leave_batches(tmp_path, 50)
    upstream = Upstream(None)
    upstream.open.clear()

    async def scenario(host):
        one = sender(host, upstream)
        await asyncio.to_thread(wait_until, lambda: one.read_state().n_waiting == 49)
        with no_more_files():
            upstream.open.set()
            state = await asyncio.to_thread(
                wait_until, lambda: (state := one.read_state()).last_error and state
            )
            assert "Too many open files" in state.last_error
            assert (state.n_waiting, state.n_dropped) == (49, 0)
            assert state.away_s is not None
        await asyncio.to_thread(wait_until, lambda: len(upstream.taken) == 50)
        assert one.read_state().away_s is None
        await end(one, host)

    with storing(tmp_path) as (host, _):
        asyncio.run(scenario(host))
        assert host.read("ingero_fleet_storage_damaged_batches_total", **LABELS) == 0
    assert [number for _, number, _ in upstream.taken] == list(range(50))
    assert [one.name for one in (tmp_path / "exporters.otlphttp%2Fup").iterdir()] == ["lock"]


def test_a_stop_leaves_a_queue_that_cannot_be_read_for_now_to_the_next_process(tmp_path):
    leave_batches(tmp_path, 5)

    upstream = Upstream(None)
    upstream.open.clear()

    async def scenario(host):
        one = sender(host, upstream)
        await asyncio.to_thread(wait_until, lambda: one.read_state().n_waiting == 4)
        with no_more_files():
            upstream.open.set()
            await asyncio.to_thread(wait_until, lambda: one.read_state().last_error)
            await end(one, host)

    with storing(tmp_path) as (host, _):
        asyncio.run(scenario(host))
    with storing(tmp_path) as (_, extension):
        assert len(extension.open_store("exporters.otlphttp/up").list_keys()) == 4


def test_a_stored_batch_that_meets_a_defect_is_counted_as_lost_and_does_not_come_back(tmp_path):
    async def scenario(host):
        one = sender(host, Upstream(ValueError), queue_size=3)
        for number in range(8):
            one.consume(metrics(number))
            await asyncio.to_thread(wait_until, lambda: one.read_state().n_waiting == 0)
        await end(one, host)

    with storing(tmp_path) as (host, _):
        asyncio.run(scenario(host))
        lost = host.read("otelcol_exporter_send_failed_metric_points_total", exporter="otlphttp/up")
    assert lost == 8
    assert [one.name for one in (tmp_path / "exporters.otlphttp%2Fup").iterdir()] == ["lock"]


def test_queue_size_counts_what_an_earlier_process_left(tmp_path):
    async def scenario(host):
        one = sender(host, Upstream(), queue_size=2)
        try:
            for number in range(10):
                one.consume(metrics(number))
        finally:
            await end(one, host)

    with storing(tmp_path) as (host, _), pytest.raises(RetryableError, match="queue is full"):
        asyncio.run(scenario(host))
    with storing(tmp_path) as (host, extension):
        n_left = len(extension.open_store("exporters.otlphttp/up").list_keys())
    assert 2 <= n_left <= 3  # one may have been under way


async def reload_while_under_way(tmp_path, upstream, following):
    """Stop sender and storage while the first of two batches is under way, and start both again; the host."""
    host = ManualHost()
    config = parse_model(FileStorageConfig, {"directory": str(tmp_path), "timeout": "0s"})

    async def start_storage():
        extension = FileStorage(NAME, config)
        await extension.start(host)
        host._offers = [(BatchStorage, NAME, extension)]
        return extension

    extension = await start_storage()
    one = sender(host, upstream)
    one.consume(metrics(1))
    await asyncio.to_thread(wait_until, lambda: one.read_state().n_waiting == 0)
    one.consume(metrics(2))
    stopping = asyncio.create_task(one.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await extension.stop()
    extension = await start_storage()
    two = sender(host, following)
    assert (two.read_state().n_waiting, len(following.taken)) == (1, 0)
    upstream.open.set()
    await asyncio.to_thread(wait_until, lambda: len(upstream.taken + following.taken) == 2)
    await end(two, host)
    await extension.stop()
    return host


@pytest.mark.parametrize("answer", [None, RetryableError])
def test_a_stored_batch_under_way_over_a_reload_is_sent_again_only_if_it_was_not_taken(
    tmp_path, answer
):
    upstream, following = Upstream(answer), Upstream(None)
    upstream.open.clear()
    host = asyncio.run(reload_while_under_way(tmp_path, upstream, following))
    assert [number for _, number, _ in upstream.taken] == ([1] if answer is None else [])
    assert [number for _, number, _ in following.taken] == ([2] if answer is None else [1, 2])
    assert [one.name for one in (tmp_path / "exporters.otlphttp%2Fup").iterdir()] == ["lock"]
    name = "otelcol_exporter_{}_metric_points_total"
    assert host.read(name.format("sent"), exporter="otlphttp/up") == 2
    assert host.read(name.format("send_failed"), exporter="otlphttp/up") == 0
    assert host.read("ingero_fleet_storage_damaged_batches_total", **LABELS) == 0


def test_a_stored_batch_under_way_at_the_end_stays_for_the_next_process(tmp_path):
    upstream = Upstream()
    upstream.open.clear()

    async def scenario(host):
        one = sender(host, upstream)
        one.consume(metrics(1))
        await asyncio.to_thread(wait_until, lambda: one.read_state().n_waiting == 0)
        host.draining = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.stop(), 0.01)
        upstream.open.set()
        await asyncio.to_thread(join_threads)

    with storing(tmp_path) as (host, _):
        asyncio.run(scenario(host))
        name = "otelcol_exporter_send_failed_metric_points_total"
        assert host.read(name, exporter="otlphttp/up") == 0
    with storing(tmp_path) as (_, extension):
        assert len(extension.open_store("exporters.otlphttp/up").list_keys()) == 1


def test_storage_that_does_not_run_or_has_no_queue_is_refused(tmp_path):
    host = ManualHost()
    with pytest.raises(ConfigError, match="no running extension 'file_storage' stores batches"):
        sender(host, Upstream())
    assert host.find(BatchStorage) == []
    with pytest.raises(ConfigError, match="storage needs a queue"):
        parse_model(QueueConfig, {"storage": "file_storage", "enabled": False})
