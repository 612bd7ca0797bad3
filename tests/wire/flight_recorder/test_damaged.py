"""Whatever a dump's bytes or fields are, the answer is a report or an error that names the file."""

import copy
import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.detect.hang import find_hang
from ingero.errors import BadDataError
from ingero.model.hang import HangVerdict
from ingero.wire.flight_recorder.job import read_job

DATA = Path(__file__).parents[2] / "data" / "flight_recorder" / "gpu_error_1st"
NCCL = pickle.loads((DATA / "_dump_13").read_bytes())
GLOO = {
    "version": "2.10",
    "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
    "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": -1, "last_completed_collective": 1}},
    "entries": [
        {
            "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "p2p_seq_id": 0,
            "op_id": seq, "profiling_name": "gloo:all_gather", "time_created_ns": seq, "input_sizes": [[4]],
            "input_dtypes": ["Float"], "output_sizes": [[2, 4]], "output_dtypes": ["Float"], "state": "scheduled",
            "retired": seq == 0, "timeout_ms": 1000, "is_p2p": False,
        }
        for seq in range(2)
    ],
}  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.binary(max_size=6),
    st.lists(st.integers(-3, 3) | st.text(max_size=2), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def ask(bodies):
    """Write the bodies as files of one folder and ask about it."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, body in bodies.items():
            (Path(scratch) / name).write_bytes(body)
        try:
            report = find_hang(read_job(Path(scratch)))
        except BadDataError as error:
            said, report = str(error), None
    if report is None:
        assert any(name in said for name in bodies) or scratch in said
    else:
        assert report.verdict in HangVerdict
        assert set(report.missing_ranks) <= set(report.ranks_known)


def places(value, path=()):
    """Every path into nested mappings and lists."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, below in items:
        yield from places(below, (*path, key))


def put(value, path, odd):
    """A copy of the value with something odd at the path; a key of a mapping goes when it is a string that starts with x."""
    if not path:
        return odd
    changed = copy.copy(list(value) if isinstance(value, tuple) else value)
    if odd == "x" and len(path) == 1 and isinstance(changed, dict):
        del changed[path[0]]
    else:
        changed[path[0]] = put(value[path[0]], path[1:], odd)
    return changed


@pytest.mark.parametrize("whole", [NCCL, GLOO], ids=["nccl", "gloo"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_field_of_another_kind_or_absent(whole, data):
    path = data.draw(st.sampled_from(list(places(whole))))
    odd = data.draw(ODD | st.just("x"))
    changed = put(whole, path, odd)
    ask({"dump_0": pickle.dumps(changed), "dump_1": pickle.dumps(whole)})


@settings(max_examples=25, deadline=None)
@given(
    cut=st.integers(0, 10_000),
    flip=st.integers(0, 10_000),
    bit=st.integers(0, 7),
    as_json=st.booleans(),
)
def test_any_byte_changed_or_cut(cut, flip, bit, as_json):
    body = bytearray(json.dumps(GLOO).encode() if as_json else pickle.dumps(GLOO))
    body[flip % len(body)] ^= 1 << bit
    ask({
        "dump_0": bytes(body[: max(1, len(body) - cut % len(body) // 4)]),
        "dump_1": pickle.dumps(GLOO),
    })


@settings(max_examples=20, deadline=None)
@given(
    text=st.text(max_size=200),
    name=st.sampled_from(["dump_0.txt", "stacks_1.txt", "page.html", "notes.txt", "x.stack"]),
)
def test_any_text_beside_the_dumps(text, name):
    ask({"dump_0": pickle.dumps(GLOO), name: text.encode(errors="replace")})


@pytest.mark.parametrize("n_groups", [4, 5])
def test_sizes_of_many_default_communicators_take_no_memory_without_end(tmp_path, n_groups):
    entries = [
        GLOO["entries"][0]
        | {
            "process_group": (f"{name}", "default_pg"),
            "input_sizes": [[1]],
            "output_sizes": [[10**6]],
        }
        | {"pg_id": name, "record_id": name}
        for name in range(n_groups)
    ]
    (tmp_path / "dump_0").write_bytes(pickle.dumps(GLOO | {"entries": entries}))
    if n_groups < 5:
        (state,) = read_job(tmp_path)
        assert [len(group.ranks) for group in state.groups.values()] == [10**6] * n_groups
    else:
        with pytest.raises(
            BadDataError, match=f"{tmp_path}: default communicators with 5000000 members"
        ):
            read_job(tmp_path)
