"""``file`` and ``debug``: what arrives can be read back."""

import asyncio
import logging
import os
import resource
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ingero.config import parse_model
from ingero.errors import IngeroError, RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.debug import DebugConfig, DebugExporter
from ingero.fleet.exporters.file import FACTORY, FileConfig, FileExporter, RotationConfig
from ingero.otlp.codec import build_gauge, build_metrics, build_number, decode_export, iter_points
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
from ingero.testing.open_files import no_more_files
from ingero.units import NS_PER_S


def _batch(*values):
    points = [build_number(float(value), 1) for value in values]
    return Batch(Signal.METRICS, build_metrics({}, [build_gauge("m", points)], "t"), 1)


def _write(settings, *batches, host=None):
    host = host or ManualHost()
    exporter = FileExporter(ComponentId("file"), parse_model(FileConfig, settings))

    async def scenario():
        await exporter.start(host)
        try:
            for batch in batches:
                host.clock.advance(NS_PER_S)
                exporter.consume(batch)
        finally:
            await exporter.stop()

    asyncio.run(scenario())
    return host


def _values(path):
    return [
        point.value
        for line in path.read_bytes().splitlines()
        for point in iter_points(decode_export(line, Signal.METRICS, "application/json"))
    ]


def test_each_line_is_one_request_that_can_be_read_back(tmp_path):
    path = tmp_path / "out.jsonl"
    _write({"path": str(path)}, _batch(1, 2), _batch(3))
    assert _values(path) == [1.0, 2.0, 3.0]
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(("append", "expected"), [(True, [1.0, 2.0]), (False, [2.0])])
def test_append_says_whether_an_existing_file_is_kept(tmp_path, append, expected):
    path = tmp_path / "out.jsonl"
    _write({"path": str(path)}, _batch(1))
    _write({"path": str(path), "append": append}, _batch(2))
    assert _values(path) == expected


def test_a_file_is_emptied_once_in_a_process_and_not_again_by_a_reload(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"{}\n")
    host = _write({"path": str(path)}, _batch(1))
    _write({"path": str(path)}, _batch(2), host=host)
    _write({"path": str(path), "flush_interval": "2s"}, _batch(3), host=host)
    assert _values(path) == [1.0, 2.0, 3.0]


def test_a_file_with_rotation_is_never_emptied(tmp_path):
    path = tmp_path / "out.jsonl"
    settings = {"path": str(path), "rotation": {"max_megabytes": 1}}
    _write(settings, _batch(1))
    _write(settings, _batch(2))
    assert _values(path) == [1.0, 2.0]


@pytest.mark.parametrize("name", ["out.jsonl", "out[1].jsonl", "out.json[l]"])
def test_full_file_is_set_aside_and_only_so_many_are_kept(tmp_path, name):
    path = tmp_path / name
    settings = {"path": str(path), "rotation": {"max_megabytes": 1, "max_backups": 2}}
    big = _batch(*range(15_000))
    host = _write(settings, *[big] * 5)
    assert len(list(tmp_path.iterdir())) == 3
    assert all(
        _values(one) == [float(value) for value in range(15_000)] for one in tmp_path.iterdir()
    )
    assert host.read("ingero_fleet_file_rotations_total", exporter="file") == 4


BIG = _batch(*range(15_000))
"""More than half a megabyte: each second one asks for a rotation at 1 MB."""


def _write_on(path, *steps, **rotation):
    """Run steps with the started exporter; the host."""
    host = ManualHost()
    settings = {"path": str(path), "rotation": {"max_megabytes": 1, **rotation}}
    exporter = FileExporter(ComponentId("file"), parse_model(FileConfig, settings))

    async def scenario():
        await exporter.start(host)
        try:
            for step in steps:
                host.clock.advance(NS_PER_S)
                step(exporter)
        finally:
            await exporter.stop()

    asyncio.run(scenario())
    return host


def _count_lines(folder):
    return {one.name: one.read_bytes().count(b"\n") for one in folder.iterdir()}


def test_lines_go_on_in_the_old_file_while_it_cannot_be_rotated_and_rotation_comes_back(
    tmp_path, caplog
):
    path = tmp_path / "out.jsonl"

    def write(exporter):
        exporter.consume(BIG)

    def write_without_files(exporter):
        with no_more_files():
            exporter.consume(BIG)

    host = _write_on(path, write, write_without_files, write_without_files, write, write)
    assert host.read("ingero_fleet_file_rotations_total", exporter="file") == 2
    assert sorted(_count_lines(tmp_path).values()) == [1, 1, 3]
    assert _count_lines(tmp_path)["out.jsonl"] == 1
    assert all(set(_values(one)) == set(range(15_000)) for one in tmp_path.iterdir())
    assert [one.getMessage() for one in caplog.records] == [
        "rotation failed; lines go on, and it is tried again"
    ]


def test_a_file_whose_rotation_never_works_takes_every_line_once(tmp_path):
    path = tmp_path / f"{'x' * 240}.jsonl"  # its name with a time is too long
    host = _write_on(path, *[lambda exporter: exporter.consume(BIG)] * 4)
    assert host.read("ingero_fleet_file_rotations_total", exporter="file") == 0
    assert _count_lines(tmp_path) == {path.name: 4}


def test_a_file_that_somebody_else_set_aside_is_opened_anew(tmp_path):
    path = tmp_path / "out.jsonl"

    def write(exporter):
        exporter.consume(BIG)

    host = _write_on(path, write, lambda _: path.rename(tmp_path / "mine"), write, write)
    assert host.read("ingero_fleet_file_rotations_total", exporter="file") == 2
    assert sorted(_count_lines(tmp_path).values()) == [1, 1, 1]
    assert _count_lines(tmp_path)["mine"] == 1


@contextmanager
def _folder_of_another():
    """A folder that this process may read, in which it may not make a file."""
    is_root = os.getuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        if is_root:
            os.setreuid(65_534, -1)  # whose permissions are asked for
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.setreuid(0, -1)
            Path(folder).chmod(0o755)


def test_validate_says_that_rotation_cannot_make_files(tmp_path):
    path = tmp_path / "out.jsonl"
    FACTORY.check_files(FileConfig(path=str(path), rotation=RotationConfig()))
    with _folder_of_another() as folder:
        path = folder / "out.jsonl"
        Path(folder).chmod(0o755)
        path.write_text("")
        path.chmod(0o666)
        Path(folder).chmod(0o555)
        FACTORY.check_files(FileConfig(path=str(path)))
        with pytest.raises(IngeroError, match="may not be written") as raised:
            FACTORY.check_files(FileConfig(path=str(path), rotation=RotationConfig()))
    assert raised.value.message.startswith(str(folder))
    assert "rotation" in raised.value.hint


def test_written_lines_reach_the_disk_at_the_flush_interval(tmp_path):
    path, host = tmp_path / "out.jsonl", ManualHost()
    exporter = FileExporter(
        ComponentId("file"), parse_model(FileConfig, {"path": str(path), "flush_interval": "3s"})
    )

    async def scenario():
        await exporter.start(host)
        exporter.consume(_batch(1))
        before = path.read_bytes()
        host.advance(3 * NS_PER_S)
        after = path.read_bytes()
        await exporter.stop()
        return before, after

    before, after = asyncio.run(scenario())
    assert before == b""
    assert after.endswith(b"\n")


def test_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(IngeroError, match=r"nowhere/out\.jsonl: No such file"):
        _write({"path": str(tmp_path / "nowhere" / "out.jsonl")})


def test_disk_that_refuses_is_worth_a_retry():
    settings = {"path": "/dev/full", "append": True}
    with pytest.raises(RetryableError, match="/dev/full"):
        _write(settings, _batch(*range(5000)))
    host = _write(settings, _batch(1))
    assert host.read("ingero_fleet_file_flush_failures_total", exporter="file") == 1


@contextmanager
def _full_disk(path, n_left):
    """The file may grow by so many bytes; the last write before that is cut off."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + n_left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("n_left", [0, 1, 100, 300_000])
def test_no_line_is_torn_or_written_twice_by_a_disk_that_was_full(tmp_path, n_left):
    path, taken = tmp_path / "out.jsonl", []

    def take(exporter, value, size):
        exporter.consume(_batch(*[value] * size))
        taken.append(value)

    def fill(exporter):
        exporter._flush()
        with _full_disk(path, n_left):
            for value, size in enumerate((20, 15_000, 20, 15_000, 20), 2):
                with suppress(RetryableError):
                    take(exporter, value, size)
            exporter._flush()

    _write_on(path, lambda one: take(one, 1, 1), fill, lambda one: take(one, 9, 20))
    assert path.read_bytes().endswith(b"\n")
    assert list(dict.fromkeys(_values(path))) == taken
    assert len(path.read_bytes().splitlines()) == len(taken) < 7


def test_a_line_that_was_left_torn_is_ended_before_the_next(tmp_path):
    path = tmp_path / "out.jsonl"
    _write({"path": str(path)}, _batch(1))
    path.write_bytes(path.read_bytes() + b'{"resourceMet')
    _write({"path": str(path), "append": True}, _batch(2))
    first, torn, last = path.read_bytes().splitlines()
    assert torn == b'{"resourceMet'
    path.write_bytes(first + b"\n" + last + b"\n")
    assert _values(path) == [1.0, 2.0]


def _lines(settings, caplog, batches, host=None):
    host = host or ManualHost()
    exporter = DebugExporter(ComponentId("debug"), parse_model(DebugConfig, settings))
    asyncio.run(exporter.start(host))
    with caplog.at_level(logging.INFO, "ingero.fleet.exporters.debug"):
        for batch in batches:
            exporter.consume(batch)
    return [record.getMessage() for record in caplog.records]


def test_verbosity_says_how_much_is_written(caplog):
    assert _lines({}, caplog, [_batch(1, 2)]) == ["exporters.debug: 2 data points"]
    caplog.clear()
    normal = _lines({"verbosity": "normal"}, caplog, [_batch(1, 2)])
    assert len(normal) == 3
    caplog.clear()
    detailed = "\n".join(_lines({"verbosity": "detailed"}, caplog, [_batch(1, 2)]))
    assert '"resourceMetrics"' in detailed


def test_sampling_writes_the_first_of_each_second_and_then_every_nth(caplog):
    host = ManualHost()
    settings = {"sampling_initial": 2, "sampling_thereafter": 3}
    lines = _lines(settings, caplog, [_batch(*[0] * size) for size in range(1, 9)], host)
    assert [line.split()[1] for line in lines] == ["1", "2", "5", "8"]
    caplog.clear()
    host.clock.advance(NS_PER_S)
    assert _lines(
        {"sampling_initial": 1, "sampling_thereafter": 0}, caplog, [_batch(1)] * 5, host
    ) == ["exporters.debug: 1 data points"]
