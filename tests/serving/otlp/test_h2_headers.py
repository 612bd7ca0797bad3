"""Header blocks that are remembered mean what hpack says they mean, whatever came between them."""

import string

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingero.errors import BadDataError
from ingero.serving.otlp.h2_frames import H2Code, H2Error
from ingero.serving.otlp.h2_headers import BlockReader, write_block

NAMES = ["a", "content-type", ":path", "grpc-timeout", "x" * 60]
fields = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.sampled_from(["", "1", "2", "application/grpc", "v" * 900])
    ),
    min_size=1,
    max_size=5,
)
"""Few names and values, so that blocks come again; long ones, so that entries are evicted."""
steps = st.lists(
    st.one_of(
        st.tuples(st.just("block"), fields, st.booleans()),
        st.tuples(st.just("again"), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.sampled_from([0, 40, 100, 4096])),
    ),
    max_size=40,
)


def make_blocks(steps):
    """Blocks of one encoder, some of them sent again as they were: what they mean then is hpack's to say."""
    encoder, sent = Encoder(), []
    for kind, *what in steps:
        if kind == "resize":
            encoder.header_table_size = what[0]
        elif kind == "block":
            listed, is_sensitive = what
            sent.append(encoder.encode([(*one, is_sensitive) for one in listed]))
        elif sent:
            sent.append(sent[what[0] % len(sent)])
    return sent


@given(steps)
@settings(max_examples=100, deadline=None)
@example([
    ("block", [("a", "1")], False),
    ("again", 0),
    ("again", 0),
    ("block", [("a", "2")], False),
    ("again", 1),
])
def test_a_block_means_what_hpack_says_after_any_others(steps):
    reader, decoder = BlockReader(1 << 16, tuple), Decoder(1 << 16)
    for block in make_blocks(steps):
        try:
            expected = tuple((bytes(n), bytes(v)) for n, v in decoder.decode(block, raw=True))
        except HPACKError:  # a block that was sent again may mean nothing by now
            with pytest.raises(H2Error):
                reader.read(block)
            return
        assert reader.read(block) == expected


def test_a_warm_block_is_built_once_and_an_insertion_forgets_it():
    built = []

    def build(listed):
        built.append(listed)
        return listed

    reader, encoder = BlockReader(1 << 16, build), Encoder()
    first = encoder.encode([("a", "1")])
    warm = encoder.encode([("a", "1")])
    assert first != warm
    assert reader.read(first) == reader.read(warm) == reader.read(warm) == ((b"a", b"1"),)
    assert len(built) == 2
    assert reader.read(encoder.encode([("b", "2")])) == ((b"b", b"2"),)
    assert reader.read(warm) == ((b"b", b"2"),)  # the index means the newer entry now
    assert len(built) == 4


def test_a_table_that_shrinks_forgets_what_its_entries_meant():
    reader, encoder = BlockReader(1 << 16, tuple), Encoder()
    reader.read(encoder.encode([("a", "1")]))
    warm = encoder.encode([("a", "1")])
    assert reader.read(warm) == ((b"a", b"1"),)
    encoder.header_table_size = 0
    reader.read(encoder.encode([(":method", "GET")]))  # adds nothing
    with pytest.raises(H2Error) as refused:
        reader.read(warm)
    assert refused.value.code is H2Code.COMPRESSION_ERROR


def test_many_blocks_are_not_all_remembered():
    reader = BlockReader(1 << 16, tuple)
    for number in range(1000):
        reader.read(write_block([(b"a", b"%d" % number)]))
    assert len(reader._known) <= 16
    reader.read(write_block([(b"a", b"x" * 5000)]))
    assert max(map(len, reader._known)) < 5000


def test_a_small_block_that_unpacks_to_a_large_list_is_refused():
    encoder = Encoder()
    first = encoder.encode([("a", "v" * 3900)])
    bomb = encoder.encode([("a", "v" * 3900)]) * 100
    reader = BlockReader(1 << 16, tuple)
    reader.read(first)
    with pytest.raises(H2Error) as refused:
        reader.read(bomb)
    assert refused.value.code is H2Code.ENHANCE_YOUR_CALM
    assert isinstance(refused.value, BadDataError)


@given(
    st.lists(
        st.tuples(
            st.text(string.ascii_lowercase, min_size=1, max_size=200).map(str.encode),
            st.binary(max_size=40000),
        ),
        max_size=4,
    )
)
@settings(max_examples=30, deadline=None)
def test_written_blocks_are_read_by_hpack(listed):
    found = Decoder(1 << 20).decode(write_block(listed), raw=True)
    assert [(bytes(name), bytes(value)) for name, value in found] == listed
