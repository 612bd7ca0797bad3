"""A pickle whose few bytes stand for too much is refused before it is loaded; every dump of plain values is read."""

import json
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.detect.hang import find_hang
from ingero.errors import BadDataError
from ingero.wire.flight_recorder.documents import decode_document
from ingero.wire.flight_recorder.job import read_dump, read_job

HEAD = b"\x80\x02}(X\x09\0\0\0pg_config}X\x07\0\0\0entries"
TAIL = b"u."


def text(words):
    return b"X" + struct.pack("<I", len(words)) + words


def doubled(times, pair=b"](%be"):
    """A list of a list twice of a list twice …; protocol 2."""
    value = b"]q\0"
    for number in range(1, times):
        again = b"h" + bytes([number - 1])
        value = pair % (value + again) + b"q" + bytes([number])
    return value


TOO_MUCH = {
    "lists": (doubled(200), "stands for far more"),
    "tuples": (doubled(200, b"(%bt"), "stands for far more"),
    "text": (b"](" + text(b"x" * 100_000) + b"q\0" + b"h\0" * 5_000 + b"e", "stands for far more"),
    "a tuple as a name": (b"}(" + doubled(20, b"(%bt") + b"Nu", "names are not text"),
    "a number as a name": (b"}(J\1\0\0\0Nu", "names are not text"),
    "a list as a name": (b"}]Ns", "names are not text"),
    "depth": (b")\x85" + b"\x85" * 2000, "nests more than 100"),
    "a place in memory": (b"]r\0\0\0\1", "numbers a value 16777216"),
    "itself": (b"]q\0(h\0e", "adds to a value that is part"),
    "growth afterwards": (b"](]q\0h\0](NNeh\0(NNee", "adds to a value that is part"),
    "a long number": (b"\x8b\x09\0\0\0" + b"\1" * 9, "more than 64 bits"),
    "a bytearray": (b"\x96\1\0\0\0\0\0\0\0x", "no plain values"),
    "a mapping of protocol 0": (b"(NNd", "no plain values"),
    "a call": (b"NR", "no plain values"),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_stands_for_more_than_its_bytes_explain_is_refused(kind):
    entries, why = TOO_MUCH[kind]
    with pytest.raises(BadDataError, match=why):
        decode_document(HEAD + entries + TAIL)


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x02",
        b"\x80\x02" + text(b"cut")[:-1],
        b"\x80\x02X\1",
        b"\x80\x02h\0.",
        b"\x80\x02e.",
        b"\x80\x02q\0.",
        b"\x80\x02\x86.",
        b"\x80\x02NNa.",
    ],
)
def test_what_is_no_whole_pickle_is_refused(body):
    with pytest.raises(BadDataError, match="neither a whole pickle"):
        decode_document(body)


def test_names_and_frames_that_entries_share_are_read_as_they_are_written():
    frame = {"name": "forward", "filename": "model.py" * 20, "line": 12}
    frames = [frame] * 60
    entries = [{"record_id": seq, "frames": frames, "state": "completed"} for seq in range(2000)]
    dump = {"pg_config": {}, "entries": entries}
    for protocol in range(2, 6):
        assert decode_document(pickle.dumps(dump, protocol)) == dump


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=300)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=6)
    | st.lists(inner, max_size=4).map(tuple) | inner.map(lambda value: [value, value]),
)  # fmt: skip


@settings(deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_every_plain_value_is_read(value, protocol):
    dump = {"pg_config": {}, "entries": value}
    assert decode_document(pickle.dumps(dump, protocol)) == dump


@pytest.fixture
def dump(data_dir):
    return pickle.loads((data_dir / "flight_recorder/gpu_error_1st/_dump_13").read_bytes())


def test_members_nested_too_deep_for_the_decoder_are_refused(dump, tmp_path):
    next(iter(dump["pg_config"].values()))["ranks"] = "[" * 100_000
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(dump))
    with pytest.raises(BadDataError, match=r"_dump_0.*of another kind"):
        read_dump(tmp_path / "_dump_0", 0)


@pytest.mark.parametrize("name", ["profiling_name", "pg_id"])
def test_a_container_where_a_text_belongs_is_not_written_out(dump, tmp_path, name):
    dump["entries"][0][name] = ["nccl:all_reduce"]
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(dump))
    with pytest.raises(BadDataError, match="of another kind"):
        read_dump(tmp_path / "_dump_0", 0)


@pytest.mark.parametrize("n_dimensions", [64, 65])
def test_a_tensor_has_no_more_dimensions_than_pytorch_gives_it(dump, tmp_path, n_dimensions):
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            continue
        entry["profiling_name"] = "nccl:all_reduce"
        entry["input_sizes"] = [[2] * n_dimensions]
    (tmp_path / "_dump_13.json").write_text(json.dumps(dump))
    if n_dimensions > 64:
        with pytest.raises(BadDataError, match="of another kind"):
            read_job(tmp_path)
    else:
        (state,) = read_job(tmp_path)
        assert find_hang([state])
        found = {op.elements for ops in state.recorded.values() for op in ops.values()}
        assert found == {2**64}
