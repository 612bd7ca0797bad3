"""What lies in the stream and in the buckets: pushes as workers relay them, thresholds, and what a judge has said.

Each begins with its version, because Fleets of two releases read each other's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
import zstandard

from ingero.errors import BadDataError
from ingero.fleet.workers.messages import RelayedPush, Threshold
from ingero.otlp.codec import Export, decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal

VERSION: Final = 1
_UNWRITTEN: Final = 1
"""What a document that names no version has: the fields of a document that have their default are not written."""
_VOCABULARY: Final = 1
_SINCE_1: Final = ("cost", "panic began", "straggler ")
"""What entries of a ledger are about since vocabulary 1. A release that does not know them leaves them as they were,
and drops the number of the vocabulary: what it reported itself is not in them."""
_PACK_BYTES: Final = 16 << 10
"""Longer messages are compressed: a server refuses those above its ``max_payload``, of which the default is 1 MiB."""
_MAX_BYTES: Final = 256 << 20
MAX_WRITTEN_BYTES: Final = 192 << 10
"""Of one report in a ledger, packed: a few thousand records."""
_PLAIN: Final = b"\x01"
_ZSTD: Final = b"\x02"
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_SAFE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LoggedPush(msgspec.Struct, array_like=True):
    """A push of one cluster.

    Attributes:
        cluster_id: Whose.
        is_shared: Its body has other clusters' resources too, which the stream has under their own.
        received_wall_ns: When its receiver had the whole body, by its own clock; judges go by the stream's.
        push: The push; its number is 0.
    """

    cluster_id: str
    is_shared: bool
    received_wall_ns: int
    push: RelayedPush


class ClusterAnswers(msgspec.Struct, omit_defaults=True):
    """What receivers answer a cluster's pushes with.

    Attributes:
        cluster_id: Whose.
        thresholds: By cgroup hash; that of the cluster under an empty one.
        questions: What nodes are asked.
        judge: Who says so.
        version: Of this format.
    """

    cluster_id: str
    thresholds: dict[str, Threshold] = {}
    questions: dict[str, str] = {}
    judge: str = ""
    version: int = _UNWRITTEN


class WrittenReport(msgspec.Struct, array_like=True):
    """A report as it is to leave, whichever Fleet sends it.

    Attributes:
        sender: Name of the `ingero.fleet.component.ReportSender`.
        about: What its states are about.
        content: Its log records, packed by `write_report`.
    """

    sender: str
    about: tuple[str, ...]
    content: bytes


class ClusterLedger(msgspec.Struct, omit_defaults=True, rename={"reported": "said"}):
    """What was reported of a cluster.

    Attributes:
        reported: The last state of each report, by what it is about.
        pending: Of what may not have left yet: what was said before it; None for nothing.
        passed_seq: Pushes up to this one in the stream were passed on down the pipelines.
        version: Of this format.
        vocabulary: Which entries the release that wrote it keeps up to date.
        written: Reports that may not have left yet, for another Fleet to send as they are; in their order.
    """

    reported: dict[str, str] = {}
    pending: dict[str, str | None] = {}
    passed_seq: int = 0
    version: int = _UNWRITTEN
    vocabulary: int = 0
    written: list[WrittenReport] = []

    def restore(self) -> dict[str, str]:
        """What was certainly reported, without entries that its writer only carried along from a later release."""
        reported = dict(self.reported)
        for about, before in self.pending.items():
            if before is None:
                reported.pop(about, None)
            else:
                reported[about] = before
        if self.vocabulary < _VOCABULARY:
            return {
                about: state for about, state in reported.items() if not about.startswith(_SINCE_1)
            }
        return reported


DocumentT = TypeVar("DocumentT", ClusterAnswers, ClusterLedger)

_encoder: Final = msgspec.msgpack.Encoder()
_read_push: Final = msgspec.msgpack.Decoder(LoggedPush)
_read_answers: Final = msgspec.msgpack.Decoder(ClusterAnswers)
_read_ledger: Final = msgspec.msgpack.Decoder(ClusterLedger)


def build_token(cluster_id: str) -> str:
    """A cluster's id as a part of a subject and a key: itself where it can be one, else a hash."""
    if _SAFE.fullmatch(cluster_id):
        return cluster_id
    return "=" + hashlib.blake2b(cluster_id.encode(), digest_size=16).hexdigest()


def encode_push(push: LoggedPush) -> bytes:
    """A push as it lies in the stream."""
    content = _encoder.encode(push)
    if len(content) < _PACK_BYTES:
        return _PLAIN + content
    return _ZSTD + zstandard.ZstdCompressor(level=1).compress(content)


def decode_push(stored: bytes) -> LoggedPush:
    """A push from the stream.

    Raises:
        BadDataError: It is none that this release can read.
    """
    kind, content = stored[:1], stored[1:]
    try:
        if kind == _ZSTD:
            content = _unpack(content)
        elif kind != _PLAIN:
            raise BadDataError(f"a push of another format: {kind.hex() or 'empty'}")
        return _read_push.decode(content)
    except (zstandard.ZstdError, *_UNREADABLE) as error:
        raise BadDataError(f"not a push: {error}") from error


def _unpack(content: bytes) -> bytes:
    # Its head says how long it will be, and so much memory is taken at once.
    if not 0 <= zstandard.frame_content_size(content) <= _MAX_BYTES:
        raise BadDataError("a message that says no size, or too large a one")
    return zstandard.ZstdDecompressor().decompress(content)


def write_report(sender: str, about: Iterable[str], export: Export) -> WrittenReport | None:
    """A report as it lies in a ledger; None for one that is too large for it."""
    content = zstandard.ZstdCompressor(level=1).compress(encode_protobuf(export))
    if len(content) > MAX_WRITTEN_BYTES:
        return None
    return WrittenReport(sender, tuple(about), content)


def read_report(written: WrittenReport) -> Export:
    """The log records of a report. Raises BadDataError when they cannot be read."""
    try:
        return decode_protobuf(_unpack(written.content), Signal.LOGS)
    except zstandard.ZstdError as error:
        raise BadDataError(f"not a report: {error}") from error


def encode_document(document: ClusterAnswers | ClusterLedger) -> bytes:
    """Answers or a ledger as it lies in its bucket, of this release's `VERSION`."""
    if isinstance(document, ClusterLedger):
        document = msgspec.structs.replace(document, vocabulary=_VOCABULARY)
    return _encoder.encode(msgspec.structs.replace(document, version=VERSION))


def decode_answers(stored: bytes) -> ClusterAnswers:
    """News from the bucket. Raises BadDataError when this release cannot read it."""
    return _decode_document(stored, _read_answers)


def decode_ledger(stored: bytes) -> ClusterLedger:
    """A ledger from the bucket. Raises BadDataError when this release cannot read it."""
    return _decode_document(stored, _read_ledger)


def _decode_document(stored: bytes, decoder: msgspec.msgpack.Decoder[DocumentT]) -> DocumentT:
    try:
        document = decoder.decode(stored)
    except _UNREADABLE as error:
        raise BadDataError(f"not a document of ours: {error}") from error
    if document.version > VERSION:
        raise BadDataError(f"written by a later release: version {document.version}")
    return document
