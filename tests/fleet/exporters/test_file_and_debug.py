"""``file`` and ``debug``: what arrives can be read back."""

import asyncio
import logging

import pytest

from ingero.config import parse_model
from ingero.errors import IngeroError, RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.debug import DebugConfig, DebugExporter
from ingero.fleet.exporters.file import FileConfig, FileExporter
from ingero.otlp.codec import build_gauge, build_metrics, build_number, decode_export, iter_points
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
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


def test_full_file_is_set_aside_and_only_so_many_are_kept(tmp_path):
    path = tmp_path / "out.jsonl"
    settings = {"path": str(path), "rotation": {"max_megabytes": 1, "max_backups": 2}}
    big = _batch(*range(15_000))
    host = _write(settings, *[big] * 5)
    assert len(list(tmp_path.iterdir())) == 3
    assert all(
        _values(one) == [float(value) for value in range(15_000)] for one in tmp_path.iterdir()
    )
    assert host.read("ingero_fleet_file_rotations_total", exporter="file") == 4


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
