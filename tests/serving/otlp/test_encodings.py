"""What gzip bodies of many members cost, and what comes out."""

import gzip
import random
import zlib

import pytest

from ingero.errors import BadDataError
from ingero.serving.otlp import encodings
from ingero.serving.otlp.encodings import INFLATE_STEP_BYTES, MAX_MEMBERS, TooLargeError, decompress

LIMIT = 8 << 20
NOISE = random.Random(1).randbytes(300_000)
"""Does not become smaller."""


@pytest.mark.parametrize("n_members", [1, 2, MAX_MEMBERS])
def test_the_members_of_a_body_come_out_as_one(n_members):
    assert decompress(gzip.compress(b"ab") * n_members, "gzip", LIMIT) == b"ab" * n_members


def test_members_longer_than_what_is_taken_at_once_come_out_whole():
    body = gzip.compress(NOISE) + gzip.compress(bytes(1_000_000)) + gzip.compress(NOISE)
    assert decompress(body, "gzip", LIMIT) == NOISE + bytes(1_000_000) + NOISE


@pytest.mark.parametrize("n_bytes", [1, INFLATE_STEP_BYTES, INFLATE_STEP_BYTES + 1])
def test_a_body_that_is_cut_short_is_refused_wherever_that_is(n_bytes):
    with pytest.raises(BadDataError, match="cut short"):
        decompress(gzip.compress(NOISE)[:n_bytes], "gzip", LIMIT)


def test_the_limit_holds_over_all_members():
    member = gzip.compress(bytes(1000))
    assert len(decompress(member * 8, "gzip", 8000)) == 8000
    with pytest.raises(TooLargeError):
        decompress(member * 8, "gzip", 7999)


def test_more_members_than_any_sender_makes_are_refused():
    with pytest.raises(BadDataError, match=f"more than {MAX_MEMBERS} members"):
        decompress(gzip.compress(b"") * (MAX_MEMBERS + 1), "gzip", LIMIT)


def test_a_member_costs_no_copy_of_all_that_follows(monkeypatch):
    unused = []

    class Counting:
        def __init__(self, window):
            self._stream = zlib.decompressobj(window)

        def __getattr__(self, name):
            value = getattr(self._stream, name)
            if name == "unused_data":
                unused.append(len(value))
            return value

    class Zlib:
        decompressobj, error = Counting, zlib.error

    monkeypatch.setattr(encodings, "zlib", Zlib)
    assert decompress(gzip.compress(b"") * 100 + gzip.compress(NOISE), "gzip", LIMIT) == NOISE
    assert max(unused) < INFLATE_STEP_BYTES
