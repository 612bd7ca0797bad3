"""Remediation messages: one JSON object a line, from an agent to the consumer on its local socket.

The existing agent's contract, version 1: required fields may not vanish, optional ones are absent when zero or empty,
a consumer ignores fields and types it does not know. Transport (who connects, what a slow consumer costs) is not
here.

Deviations from the existing agent, each readable by its consumers:

* ``rank`` 0 is written whenever the job's size is known. The existing agent drops it, as Go's ``omitempty`` does, so
  a reader takes a missing rank beside a ``world_size`` as 0 (`find_rank`).
* Times are written in UTC (``Z``), not with the local offset.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from ingero.errors import BadDataError
from ingero.units import NS_PER_S
from ingero.wire.names import UdsType

LINE_MAX_BYTES: Final = 64 * 1024
"""Longest line a consumer of the existing agent reads (straggler-sink)."""


class UdsMessage(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True, frozen=True):
    """Root of the messages; ``type`` is the first key of the line, the others follow in the contract's order."""


class Memory(UdsMessage, tag=UdsType.MEMORY.value, kw_only=True, frozen=True):
    """A process allocated or freed device memory."""

    pid: int
    gpu_id: int
    allocated_bytes: int
    total_vram: int
    utilization_pct: float
    last_alloc_size: int
    timestamp_ns: int
    comm: str = ""


class Straggle(UdsMessage, tag=UdsType.STRAGGLE.value, kw_only=True, frozen=True):
    """A process lost throughput while others took its CPU; found on this node alone.

    Attributes:
        preempting_pids: None when no process preempted it: an empty list is written as ``null``.
    """

    pid: int
    throughput_drop_pct: float
    sched_switch_count: int
    preempting_pids: list[int] | None
    timestamp_ns: int
    sustained: bool
    comm: str = ""
    event_id: str = ""
    rank: int | None = None
    world_size: int = 0


class StragglerState(UdsMessage, tag=UdsType.STRAGGLER_STATE.value, kw_only=True, frozen=True):
    """The node's score is under its threshold; one line per tick.

    Attributes:
        timestamp: RFC 3339 with nanoseconds (`format_timestamp`).
        event_id: UUID; the same as on the event push.
        labels: What the node's workload said last of itself, such as its step. New here.
    """

    node_id: str
    cluster_id: str
    score: float
    threshold: float
    detection_mode: str
    dominant_signal: str
    timestamp: str
    event_id: str = ""
    rank: int | None = None
    world_size: int = 0
    labels: dict[str, str] = {}


class StragglerResolved(
    UdsMessage, tag=UdsType.STRAGGLER_RESOLVED.value, kw_only=True, frozen=True
):
    """The node recovered; one line per recovery."""

    node_id: str
    cluster_id: str
    timestamp: str
    event_id: str = ""
    rank: int | None = None
    world_size: int = 0


class InferenceOutlier(UdsMessage, tag=UdsType.INFERENCE_OUTLIER.value, kw_only=True, frozen=True):
    """An inference step took far longer than its baseline."""

    node_id: str
    cluster_id: str
    timestamp: str
    pid: int
    step_duration_ns: int
    baseline_p95_ns: int
    bucket: str
    event_id: str = ""
    cgroup_path_hash: str = ""
    stream_handle: int = 0
    phase: str = ""
    baseline_mean_ns: int = 0
    memfrag_events_in_step: int = 0
    throttle_reasons: int = 0
    min_sm_clock_mhz: int = 0
    kv_cache_top_alloc_ages_ms: list[int] = []
    rank: int | None = None
    world_size: int = 0


class InferenceSamplerDegraded(
    UdsMessage, tag=UdsType.INFERENCE_SAMPLER_DEGRADED.value, kw_only=True, frozen=True
):
    """Outlier sampling of one workload pauses until ``cooldown_end``."""

    node_id: str
    cluster_id: str
    timestamp: str
    pid: int
    bucket: str
    cause: str
    cooldown_end: str
    cgroup_path_hash: str = ""
    stream_handle: int = 0
    phase: str = ""
    rank: int | None = None
    world_size: int = 0


class UnknownMessage(msgspec.Struct, frozen=True):
    """A well-formed line of a type this version does not know: to be counted and ignored."""

    type: str


KnownMessage = (
    Memory
    | Straggle
    | StragglerState
    | StragglerResolved
    | InferenceOutlier
    | InferenceSamplerDegraded
)


JobMessage = (
    Straggle | StragglerState | StragglerResolved | InferenceOutlier | InferenceSamplerDegraded
)
"""Messages that may place their node in a distributed job: ``rank`` is None and ``world_size`` 0 when it is not."""


class _Envelope(msgspec.Struct):
    type: str = ""


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[KnownMessage]] = msgspec.json.Decoder(KnownMessage)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_TYPES: Final = frozenset(kind.value for kind in UdsType)


def encode_message(message: KnownMessage) -> bytes:
    """One line, its newline included."""
    return _ENCODER.encode(message) + b"\n"


def decode_message(line: bytes) -> KnownMessage | UnknownMessage:
    """Read one line, with or without its newline.

    Raises:
        BadDataError: It is no JSON object, has no type, lacks a required field, or is longer than `LINE_MAX_BYTES`.
    """
    if len(line) > LINE_MAX_BYTES:
        raise BadDataError(f"a line of {len(line)} bytes; {LINE_MAX_BYTES} is the limit")
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as error:
        kind = _find_type(line)
        if not kind or kind in _TYPES:
            raise BadDataError(f"not a remediation message: {error}") from error
        return UnknownMessage(kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"not a remediation message: {error}") from error


def find_rank(message: JobMessage) -> int | None:
    """The rank as its sender meant it: a missing one beside a world size is 0."""
    if message.rank is None and message.world_size > 0:
        return 0
    return message.rank


def _find_type(line: bytes) -> str:
    try:
        return _ENVELOPE.decode(line).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # what follows the fields that the first look refused is not JSON


def format_timestamp(wall_ns: int) -> str:
    """Nanoseconds since the epoch as RFC 3339 in UTC, without trailing zeros of the fraction, as Go's RFC3339Nano."""
    seconds, fraction_ns = divmod(wall_ns, NS_PER_S)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f".{fraction_ns:09d}".rstrip("0").rstrip(".")
    return f"{text}{fraction}Z"
