"""What a workload says of itself: one JSON object a line on the agent's annotation socket.

The existing agent's contract, version 1 (agent v0.17): ``labels`` is required, everything else may be left out, fields
that are not known are ignored, and no line is answered. New here is ``self``: the sender's own process as the agent
sees it, which is right also from inside a container, where the sender knows itself by another number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ingero.errors import BadDataError

LINE_MAX_BYTES: Final = 16 * 1024
LINES_PER_S: Final = 1000
"""Of one connection; further ones in the same second are not taken."""
MAX_LABELS: Final = 32
KEY_MAX_BYTES: Final = 64
VALUE_MAX_BYTES: Final = 256
SYSTEM_SOCKET: Final = Path("/run/ingero/annotate.sock")
USER_SOCKET: Final = Path(".ingero/annotate/annotate.sock")
"""Below the home directory; where the agent cannot write to ``/run``."""

_KEY: Final = re.compile(r"[A-Za-z0-9_.-]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

Moment = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Nanoseconds since the epoch on the wall clock; 0 is not given."""


class Annotation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        labels: What is said, such as ``{"step": "41", "phase": "forward"}``.
        ts: When; 0 is when the agent reads it. An instant holds until the same key is said again.
        pid: Of which process, by the agent's numbering; 0 is the whole node.
        is_self: Of the sender's own process, whatever it calls itself; wins over ``pid``.
        start_time: The process's start in clock ticks, to be sure of it; 0 does not ask.
        span_start: With ``span_end`` the labels hold between the two only.
        span_end: Not before ``span_start``.
        v: Version of the contract.
    """

    labels: dict[str, str]
    ts: Moment = 0
    pid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)] = 0
    is_self: bool = msgspec.field(default=False, name="self")
    start_time: Moment = 0
    span_start: Moment = 0
    span_end: Moment = 0
    v: int = 1


_DECODER: Final = msgspec.json.Decoder(Annotation)
_ENCODER: Final = msgspec.json.Encoder()


def encode_annotation(annotation: Annotation) -> bytes:
    """One line, its newline included.

    Raises:
        BadDataError: An agent would not take it.
    """
    check_annotation(annotation)
    line = _ENCODER.encode(annotation) + b"\n"
    if len(line) > LINE_MAX_BYTES:
        raise BadDataError(f"an annotation of {len(line)} bytes; {LINE_MAX_BYTES} is the limit")
    return line


def decode_annotation(line: bytes) -> Annotation:
    """Read one line.

    Raises:
        BadDataError: It is no JSON object, or breaks a rule.
    """
    try:
        annotation = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"not an annotation: {error}") from error
    check_annotation(annotation)
    return annotation


def check_annotation(annotation: Annotation) -> None:
    """Check what the types do not say.

    Raises:
        BadDataError: Says which rule is broken.
    """
    if not 0 < len(annotation.labels) <= MAX_LABELS:
        raise BadDataError(
            f"an annotation has 1 to {MAX_LABELS} labels, not {len(annotation.labels)}"
        )
    for key, value in annotation.labels.items():
        if not _KEY.fullmatch(key) or len(key) > KEY_MAX_BYTES:
            raise BadDataError(
                f"label {key[:80]!r}: a key has 1 to {KEY_MAX_BYTES} of A-Z a-z 0-9 _ . -"
            )
        if len(value) > VALUE_MAX_BYTES or _count_bytes(value) > VALUE_MAX_BYTES:
            raise BadDataError(f"label {key}: a value has at most {VALUE_MAX_BYTES} bytes")
        if _CONTROL.search(value):
            raise BadDataError(f"label {key}: a value holds no control character")
    start, end = annotation.span_start, annotation.span_end
    if bool(start) != bool(end) or end < start:
        raise BadDataError("a span has a start and an end that is not before it")


def _count_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise BadDataError("a label's value is not UTF-8 text") from error
