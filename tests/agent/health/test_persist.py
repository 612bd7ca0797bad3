import json

import pytest

from ingero.agent.health.persist import (
    LoadOutcome,
    encode_baseline,
    load_baseline,
    parse_time,
    save_baseline,
)
from ingero.agent.health.signals.baseline import Baseline, BaselineSettings, SavedBaseline
from ingero.agent.health.signals.reading import Signals
from ingero.errors import StoreError

SETTINGS = BaselineSettings()
MINUTE_NS = 60_000_000_000
SAVED_NS = parse_time("2026-04-16T12:00:00.000000123Z")


@pytest.fixture
def recorded(data_dir):
    return (data_dir / "wire_samples" / "baseline_file.json").read_bytes()


def load(path, wall_ns=SAVED_NS + MINUTE_NS):
    return load_baseline(path, SETTINGS, wall_ns=wall_ns, stale_age_ns=10 * MINUTE_NS)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_existing_agents_file_is_read_and_written_byte_for_byte(recorded, tmp_path):
    path = tmp_path / "health-baseline.json"
    path.write_bytes(recorded)
    loaded = load(path)
    assert loaded.outcome is LoadOutcome.FRESH
    assert loaded.baseline.n_samples == 4
    assert loaded.baseline.fast == (37.99, 0.30951000000000006, 0.27512000000000003, 0.24073)
    assert encode_baseline(loaded.baseline, SETTINGS, wall_ns=SAVED_NS) == recorded


def test_what_is_saved_is_restored(tmp_path):
    first, second = Baseline(), Baseline()
    for throughput in (100, 200, 50):
        first.fold(Signals(throughput, 0.9, 0.8, 0.7))
    path = tmp_path / "deep" / "down" / "baseline.json"
    save_baseline(path, first.save(), SETTINGS, wall_ns=SAVED_NS)
    second.restore(load(path).baseline)
    assert second.fast == first.fast
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["baseline.json"]


def test_the_workload_is_kept_with_the_averages(tmp_path):
    path = tmp_path / "b.json"
    saved = SavedBaseline(4, (1.0,) * 4, (0.1,) * 4, workload="job-7")
    save_baseline(path, saved, SETTINGS, wall_ns=SAVED_NS)
    assert load(path).baseline == saved


def test_keys_of_others_are_passed_over(recorded, tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(change(recorded, workload=["of", "another", "kind"], more=1))
    assert load(path).outcome is LoadOutcome.FRESH
    assert load(path).baseline.workload == ""


def test_no_file_is_missing(tmp_path):
    assert load(tmp_path / "none.json").outcome is LoadOutcome.MISSING


@pytest.mark.parametrize("age_ns", [-1, 10 * MINUTE_NS + 1])
def test_a_file_that_is_old_or_from_the_future_is_deleted(recorded, tmp_path, age_ns):
    path = tmp_path / "b.json"
    path.write_bytes(recorded)
    assert load(path, SAVED_NS + age_ns).outcome is LoadOutcome.STALE
    assert not path.exists()


def change(recorded, **keys):
    return json.dumps(json.loads(recorded) | keys).encode()


CORRUPT = {
    "not JSON": b"{",
    "a list": b"[]",
    "not text": b"\xff\xfe{}",
    "empty": b"",
    "deep": b"[" * 100_000,
    "schema": {"schema_version": 0},
    "count": {"sample_count": -1},
    "count type": {"sample_count": True},
    "time": {"saved_at": "yesterday"},
    "no time": {"saved_at": None},
    "alpha": {"fast_alpha": 0.2},
    "negative": {"fast_ema": {"Throughput": -1, "Compute": 0, "Memory": 0, "CPU": 0}},
    "nan": {"hard_floor": {"Throughput": float("nan"), "Compute": 0, "Memory": 0, "CPU": 0}},
    "overflow": {"fast_ema": {"Throughput": 10**400, "Compute": 0, "Memory": 0, "CPU": 0}},
    "lacking": {"fast_ema": {"Throughput": 1}},
    "large": b" " * ((1 << 20) + 1),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_set_aside_and_kept(recorded, tmp_path, name):
    body = CORRUPT[name]
    body = change(recorded, **body) if isinstance(body, dict) else body
    path = tmp_path / "b.json"
    for _ in range(2):
        path.write_bytes(body)
        assert load(path).outcome is LoadOutcome.CORRUPT
        assert not path.exists()
    stamp = "b.json.corrupt-20260416T120100.000000123Z"
    assert names(tmp_path) == [stamp, f"{stamp}.1"]
    assert (tmp_path / stamp).read_bytes() == body


def test_a_newer_file_is_left_alone(recorded, tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(change(recorded, schema_version=2))
    assert load(path).outcome is LoadOutcome.NEWER_VERSION
    assert path.exists()


def test_a_path_that_cannot_be_read_is_left_alone(tmp_path):
    path = tmp_path / "directory"
    path.mkdir()
    assert load(path).outcome is LoadOutcome.UNREADABLE
    assert path.is_dir()


def test_a_failed_save_says_why_and_leaves_no_trace(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot be saved"):
        save_baseline(blocked / "b.json", SavedBaseline(0, (0,) * 4, (0,) * 4), SETTINGS, wall_ns=0)
    target = tmp_path / "taken"
    target.mkdir()
    (target / "x").write_text("")
    with pytest.raises(StoreError):
        save_baseline(target, SavedBaseline(0, (0,) * 4, (0,) * 4), SETTINGS, wall_ns=0)
    assert names(tmp_path) == ["file", "taken"]


def test_times_with_an_offset_and_fewer_decimals_are_read():
    assert parse_time("2026-04-16T14:00:00+02:00") == SAVED_NS - 123
    assert parse_time("2026-04-16T12:00:00.5Z") == SAVED_NS - 123 + 500_000_000
    for text in ("2026-04-16", "2026-13-16T12:00:00Z", "2026-04-16T12:00:00"):
        with pytest.raises(ValueError, match=r"time|month"):
            parse_time(text)
