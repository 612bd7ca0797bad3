"""What workers and the judge say to each other: frames of msgpack over a socket pair that nobody else has.

A frame is four bytes of length, big-endian, and a list of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from ingero.fleet.component import WITHHELD, PushAnswer

Threshold = tuple[float, bool]
"""Value and quorum; `SILENT` is a panic in which none is sent."""

SILENT: Final[Threshold] = (0.0, False)
_LENGTH_BYTES: Final = 4


class RelayedPush(msgspec.Struct, array_like=True, tag="push"):
    """A request that a worker let in.

    Attributes:
        number: By which the worker knows the answer.
        endpoint_idx: Which receiver and protocol.
        signal: What is sent.
        content_type: Of the body.
        hint: `PushContext.cluster_hint`.
        subject: `PushContext.auth_subject`.
        clusters: `PushContext.allowed_clusters`.
        body: Uncompressed.
    """

    number: int
    endpoint_idx: int
    signal: str
    content_type: str
    hint: str
    subject: str
    clusters: tuple[str, ...] | None
    body: bytes


class RelayedAnswer(msgspec.Struct, array_like=True, tag="answer"):
    """What became of it: the fields of an ``OtlpAnswer``, its status by name, and what its sender gets with it."""

    number: int
    status: str
    message: str = ""
    retry_after_s: int = 0
    n_rejected: int = 0
    threshold: Threshold | None = None
    question: str | None = None


class ThresholdUpdate(msgspec.Struct, array_like=True, tag="threshold"):
    """The threshold of a cluster changed; None when there is none any more."""

    endpoint_idx: int
    cluster_id: str
    threshold: Threshold | None


class WorkerReady(msgspec.Struct, array_like=True, tag="ready"):
    """A worker listens."""


class WorkerFailed(msgspec.Struct, array_like=True, tag="failed"):
    """A worker cannot listen, and ends."""

    message: str
    hint: str


class WorkerCounts(msgspec.Struct, array_like=True, tag="counts"):
    """What a worker counted since it last said so.

    Attributes:
        added: Name, label values and addition of each counter that moved.
        cpu_s: Processor time of its whole life.
        resident_bytes: Its memory now.
    """

    added: list[tuple[str, tuple[str, ...], float]]
    cpu_s: float
    resident_bytes: int


class StopOrder(msgspec.Struct, array_like=True, tag="stop"):
    """Answer what is in flight within this time, then end."""

    within_s: float


FromWorker = RelayedPush | WorkerReady | WorkerFailed | WorkerCounts
FromJudge = RelayedAnswer | ThresholdUpdate | StopOrder
_encoder: Final = msgspec.msgpack.Encoder()
READ_WORKER: Final = msgspec.msgpack.Decoder(list[FromWorker])
READ_JUDGE: Final = msgspec.msgpack.Decoder(list[FromJudge])


def encode_frame(messages: Sequence[FromWorker | FromJudge]) -> bytes:
    """One frame of these."""
    content = _encoder.encode(messages)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class FrameBuffer:
    """What has arrived, cut into frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """Each frame that is complete now."""
        held = self._held
        held += data
        start = 0
        while len(held) - start >= _LENGTH_BYTES:
            content = start + _LENGTH_BYTES
            end = content + int.from_bytes(held[start:content], "big")
            if len(held) < end:
                break
            yield bytes(held[content:end])
            start = end
        if start:
            del held[:start]


def pack_threshold(answer: PushAnswer | None) -> Threshold | None:
    """An answer as it travels."""
    return None if answer is None else (answer.threshold, answer.quorum_met)


def unpack_threshold(threshold: Threshold | None) -> PushAnswer | None:
    """The answer; `WITHHELD` itself where that was sent, because receivers ask for its identity."""
    if threshold is None:
        return None
    return WITHHELD if threshold == SILENT else PushAnswer(*threshold)
