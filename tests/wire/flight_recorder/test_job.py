"""Real dumps are read, hostile ones are refused before anything in them runs."""

import json
import os
import pickle
import shutil
from collections import OrderedDict

import pytest

from ingero.detect.hang import find_hang
from ingero.errors import BadDataError
from ingero.wire.flight_recorder.job import find_dumps, read_dump, read_job


@pytest.fixture
def dumps(data_dir):
    return data_dir / "flight_recorder"


def report_of(directory):
    return find_hang(read_job(directory))


@pytest.mark.parametrize(
    ("case", "injected"), [("gpu_error_1st", (12, 14)), ("lock_gil_1st", (9, 14))]
)
def test_injected_ranks_are_named_and_no_innocent_one(dumps, case, injected):
    report = report_of(dumps / case)
    assert report.missing_ranks == injected
    assert len(report.ranks_read) == 16
    everyone = set(range(16)) - set(injected)
    assert set().union(*(root.blocks for root in report.roots)) >= everyone


def test_absent_dump_of_an_injected_rank_still_names_it(dumps, tmp_path):
    for path in (dumps / "lock_gil_1st").glob("_dump_*"):
        if path.name != "_dump_9":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    report = report_of(tmp_path)
    assert report.missing_ranks == (9, 14)
    assert report.roots[0].cause == "silent"


def test_json_dump_reads_like_the_pickle(dumps, tmp_path):
    source = dumps / "gpu_error_1st" / "_dump_13"
    document = pickle.loads(source.read_bytes())
    copy = tmp_path / "_dump_13.json"
    copy.write_text(json.dumps(document))
    shutil.copystat(source, copy)  # a dump's time is its file's
    assert find_dumps(tmp_path) == {13: copy}
    assert read_dump(copy, 13) == read_dump(source, 13)


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    marker = tmp_path / "ran"
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"pg_config": _Runs(marker), "entries": []}))
    with pytest.raises(BadDataError, match=r"_dump_0.*mkdir"):
        read_dump(path, 0)
    assert not marker.exists()


def test_even_a_harmless_class_is_refused(tmp_path):
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"pg_config": OrderedDict(), "entries": []}))
    with pytest.raises(BadDataError, match="OrderedDict"):
        read_dump(path, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04",
        b"{",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"pg_config": {}, "entries": [{"record_id": 1}]}),
        pickle.dumps({"pg_config": {"0": {"ranks": "[0"}}, "entries": []}),
        pickle.dumps({"pg_config": {"0": 5}, "entries": []}),
    ],
)
def test_file_that_is_no_dump_is_refused_with_its_name(tmp_path, body):
    path = tmp_path / "_dump_3"
    path.write_bytes(body)
    with pytest.raises(BadDataError, match="_dump_3"):
        read_dump(path, 3)


@pytest.mark.parametrize("cut", [1, 100, 1000, 4000])
def test_truncated_dump_is_refused(dumps, tmp_path, cut):
    path = tmp_path / "_dump_14"
    path.write_bytes((dumps / "gpu_error_1st" / "_dump_14").read_bytes()[:cut])
    with pytest.raises(BadDataError, match="_dump_14"):
        read_dump(path, 14)


def test_two_files_of_one_rank_and_empty_directories_are_refused(tmp_path):
    with pytest.raises(BadDataError, match="no Flight Recorder dump"):
        find_dumps(tmp_path)
    (tmp_path / "_dump_1").touch()
    (tmp_path / "other_1").touch()
    with pytest.raises(BadDataError, match="both of rank 1"):
        find_dumps(tmp_path)
    with pytest.raises(BadDataError, match="not a directory"):
        find_dumps(tmp_path / "absent")


def entry_of_nccl(seq, state, sizes=((3, 4),), **others):
    """An entry as the Flight Recorder tutorial of PyTorch 2.5 shows it, without its frames."""
    return {
        "record_id": seq - 1, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "p2p_seq_id": 0,
        "op_id": seq, "profiling_name": "nccl:all_reduce", "time_created_ns": 1724779239936775119 + seq,
        "input_sizes": sizes, "input_dtypes": ["Float"], "output_sizes": sizes, "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": state == "completed",
        "timeout_ms": 600000, "is_p2p": False, **others,
    }  # fmt: skip


def dump_of_nccl(version, *entries):
    done = sum(entry["state"] == "completed" for entry in entries)
    return pickle.dumps({
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
        "pg_status": {
            "0": {
                "last_enqueued_collective": len(entries),
                "last_started_collective": -1,
                "last_completed_collective": done,
            }
        },
        "entries": list(entries),
    })


@pytest.mark.parametrize("version", ["2.3", "2.4", "2.5", "2.7", "2.9"])
def test_older_versions_of_two_are_read(tmp_path, version):
    done = [entry_of_nccl(seq, "completed") for seq in (1, 2)]
    for rank in (0, 2):
        body = dump_of_nccl(version, *done, entry_of_nccl(3, "scheduled"))
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(body)
    (tmp_path / "nccl_trace_rank_1").write_bytes(dump_of_nccl(version, *done))
    (root,) = report_of(tmp_path).roots
    assert (root.rank, root.cause, root.missing_seq, root.last_left) == (1, "absent", 3, 2)


def test_an_operation_too_many_of_one_of_two_ranks_makes_both_suspects(tmp_path):
    # The example of PyTorch's tutorial: rank 0 enters an all-reduce of another size before the last two.
    sizes = {0: [(3, 4), (3, 4), (4, 5), (3, 4)], 1: [(3, 4)] * 4}
    for rank in (0, 1):
        entries = [
            entry_of_nccl(seq, "completed", (size,)) for seq, size in enumerate(sizes[rank], 1)
        ]
        last = [entry_of_nccl(5, "scheduled")] if rank == 0 else []
        body = dump_of_nccl("2.5", *entries, *last).replace(b"[0, 1, 2]", b"[0, 1]   ")
        (tmp_path / f"trace_{rank}").write_bytes(body)
    report = report_of(tmp_path)
    assert (report.verdict, report.missing_ranks, report.suspects) == ("unknown", (), (0, 1))


def test_a_version_before_two_is_refused_with_its_number(tmp_path):
    entry = entry_of_nccl(1, "completed")
    del entry["collective_seq_id"]
    (tmp_path / "trace_0").write_bytes(dump_of_nccl("1.5", {**entry, "seq_id": 1}))
    with pytest.raises(
        BadDataError, match=r"trace_0.*collective_seq_id.*'1\.5'; 2\.3 to 2\.10 are read"
    ):
        read_job(tmp_path)
