"""Annotation lines: what is taken, what is refused, and that what is written is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.errors import BadDataError
from ingero.wire.annotations import (
    LINE_MAX_BYTES,
    Annotation,
    decode_annotation,
    encode_annotation,
)

MOMENTS = st.integers(0, 1 << 62)


@st.composite
def annotations(draw):
    start, end = sorted(draw(st.lists(st.integers(1, 1 << 62), min_size=2, max_size=2)))
    has_span = draw(st.booleans())
    return Annotation(
        labels=draw(
            st.dictionaries(
                st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True),
                st.text(st.characters(min_codepoint=32, exclude_characters="\x7f",
                                      exclude_categories=["Cs"]), max_size=64),
                min_size=1,
                max_size=32,
            )
        ),
        ts=draw(MOMENTS),
        pid=draw(st.integers(0, 0xFFFF_FFFF)),
        is_self=draw(st.booleans()),
        start_time=draw(MOMENTS),
        span_start=start if has_span else 0,
        span_end=end if has_span else 0,
    )  # fmt: skip


@given(annotations())
def test_what_is_written_is_read(annotation):
    try:
        line = encode_annotation(annotation)
    except BadDataError:
        assert sum(len(key) + len(value) for key, value in annotation.labels.items()) > 1024
        return
    assert decode_annotation(line) == annotation
    assert line.count(b"\n") == 1
    assert len(line) <= LINE_MAX_BYTES


def test_a_line_of_the_existing_agents_clients_is_taken():
    line = b'{"labels":{"step":"3"},"ts":17,"pid":9,"start_time":5,"span_start":1,"span_end":2,"v":1,"other":[1]}'
    assert decode_annotation(line) == Annotation(
        labels={"step": "3"}, ts=17, pid=9, start_time=5, span_start=1, span_end=2, v=1
    )


@pytest.mark.parametrize(
    ("line", "description"),
    [
        ({"labels": {}}, "1 to 32 labels, not 0"),
        ({"labels": {str(i): "" for i in range(33)}}, "not 33"),
        ({"ts": 1}, "labels"),
        ({"labels": {"a b": "x"}}, "a key has"),
        ({"labels": {"": "x"}}, "a key has"),
        ({"labels": {"k" * 65: "x"}}, "a key has"),
        ({"labels": {"ü": "x"}}, "a key has"),
        ({"labels": {"k": "x" * 257}}, "at most 256 bytes"),
        ({"labels": {"k": "ü" * 129}}, "at most 256 bytes"),
        ({"labels": {"k": "a\nb"}}, "no control character"),
        ({"labels": {"k": "a\x7fb"}}, "no control character"),
        ({"labels": {"k": 3}}, "Expected `str`"),
        ({"labels": {"k": "v"}, "pid": -1}, "pid"),
        ({"labels": {"k": "v"}, "pid": 1 << 32}, "pid"),
        ({"labels": {"k": "v"}, "span_start": 3}, "a span has"),
        ({"labels": {"k": "v"}, "span_end": 3}, "a span has"),
        ({"labels": {"k": "v"}, "span_start": 3, "span_end": 2}, "a span has"),
        ([], "not an annotation"),
    ],
)
def test_a_line_that_breaks_a_rule_says_which(line, description):
    with pytest.raises(BadDataError, match=description):
        decode_annotation(json.dumps(line).encode())


@pytest.mark.parametrize("line", [b"", b"{", b"\xff", b"[" * 9000, b'{"labels":{"k":"\xff"}}'])
def test_bytes_that_are_no_json_object_are_refused(line):
    with pytest.raises(BadDataError):
        decode_annotation(line)
