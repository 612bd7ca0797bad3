"""Real dumps are read, hostile ones are refused before anything in them runs."""

import json
import os
import pickle
from collections import OrderedDict

import pytest

from ingero.detect.hang import find_hang
from ingero.errors import BadDataError
from ingero.wire.flight_recorder import find_dumps, read_dump


@pytest.fixture
def dumps(data_dir):
    return data_dir / "flight_recorder"


def report_of(directory):
    return find_hang([read_dump(path, rank) for rank, path in find_dumps(directory).items()])


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
