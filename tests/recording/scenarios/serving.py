"""Recordings of a process that answers requests token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ingero.model.events import CopyKind, HostMemory, NetOp, Source
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import COPY, FUNCTION, LAUNCH, SYNC, Loop
from ingero.units import NS_PER_MS, NS_PER_US

_COMPACTION: Final = 8821
_SEND: Final = (Source.NET, NetOp.SEND)
_RECV: Final = (Source.NET, NetOp.RECV)
Disturb = Callable[[Loop, int], None]


def _nothing(_loop: Loop, _request: int) -> None:
    pass


class _Server:
    """Forty requests of one prompt and twenty tokens each.

    Args:
        decode: What happens inside every fifth token's wait instead of it.
        prefill: What happens inside the last prompts' wait instead of it.
        between: What happens between two requests.
    """

    def __init__(
        self,
        decode: Disturb | None = None,
        prefill: Disturb | None = None,
        between: Disturb = _nothing,
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._between = between

    def build(self) -> RecordingBuilder:
        """The recording."""
        built = RecordingBuilder().name(_COMPACTION, "compaction")
        loop = Loop(built, 4821, "serve")
        for request in range(40):
            self._prompt(loop, request)
            for token in range(20):
                self._token(loop, request, token)
            self._between(loop, request)
            loop.sleep(30 * NS_PER_MS)
        return built

    def _prompt(self, loop: Loop, request: int) -> None:
        _copy(loop, 60 * NS_PER_US, 16_384, CopyKind.HOST_TO_DEVICE)
        for i in range(120):
            loop.call(LAUNCH, 8 * NS_PER_US, arg0=FUNCTION + i * 64)
            loop.rest(3 * NS_PER_US)
        _copy(loop, 15 * NS_PER_US, 4, CopyKind.DEVICE_TO_HOST)
        if self._prefill and request >= 30:
            self._prefill(loop, request)
        else:
            loop.wait(30 * NS_PER_MS)

    def _token(self, loop: Loop, request: int, token: int) -> None:
        for i in range(12):
            loop.call(LAUNCH, 8 * NS_PER_US, arg0=FUNCTION + 0x8000 + i * 64)
            loop.rest(3 * NS_PER_US)
        _copy(loop, 15 * NS_PER_US, 4, CopyKind.DEVICE_TO_HOST)
        if self._decode and not (request * 20 + token) % 5:
            self._decode(loop, request)
        else:
            loop.wait(4 * NS_PER_MS)


def _copy(loop: Loop, duration_ns: int, n_bytes: int, direction: CopyKind) -> None:
    loop.call(COPY, duration_ns, arg0=n_bytes, arg1=direction, arg3=HostMemory.PINNED)


def _waiting(ms: int) -> Disturb:
    """A wait of this length, on the CPU as far as the recording says."""

    def wait(loop: Loop, _request: int) -> None:
        loop.call(SYNC, ms * NS_PER_MS)

    return wait


def steady_server() -> RecordingBuilder:
    """Requests come and go; every prompt and every token takes as long as its like."""
    return _Server().build()


def decode_outlier() -> RecordingBuilder:
    """Every fifth token takes five times as long, and nothing that is recorded says why."""
    return _Server(decode=_waiting(20)).build()


def decode_preempted() -> RecordingBuilder:
    """Every fifth token loses its CPU to a compaction."""
    return _Server(
        decode=lambda loop, _request: loop.preempted_call(
            SYNC, 20 * NS_PER_MS, (15 * NS_PER_MS,), _COMPACTION
        )
    ).build()


def prefill_outlier() -> RecordingBuilder:
    """The last ten prompts take five times as long."""
    return _Server(prefill=_waiting(150)).build()


def kv_cache_pressure() -> RecordingBuilder:
    """Between requests the cache of another one is swapped out, and back."""

    def swap(loop: Loop, request: int) -> None:
        direction = CopyKind.HOST_TO_DEVICE if request % 2 else CopyKind.DEVICE_TO_HOST
        for _ in range(4):
            _copy(loop, 4 * NS_PER_MS, 64 << 20, direction)
        loop.wait(NS_PER_MS)

    return _Server(between=swap).build()


class _Streams:
    """One thread that serves several connections at once, a token for each per step, and a prompt now and then.

    Args:
        prompt_ms: The wait inside a prompt's step.
        is_one_by_one: The next request comes over a connection when its answer is complete, and is alone.
    """

    def __init__(self, prompt_ms: int, *, is_one_by_one: bool = False) -> None:
        self._prompt_ms = prompt_ms
        self._is_one_by_one = is_one_by_one

    def build(self) -> RecordingBuilder:
        """The recording."""
        built = RecordingBuilder()
        loop = Loop(built, 4821, "serve")
        for request in range(40):
            fd = 40 + request % 2 if self._is_one_by_one else 50 + request
            connections = (fd,) if self._is_one_by_one else (40, 41, 42)
            loop.call(_RECV, 5 * NS_PER_US, arg0=fd, arg1=900)
            self._prompt(loop)
            loop.call(_SEND, 5 * NS_PER_US, arg0=fd, arg1=120)
            for _ in range(15):
                self._token(loop, connections)
        return built

    def _prompt(self, loop: Loop) -> None:
        _copy(loop, 60 * NS_PER_US, 16_384, CopyKind.HOST_TO_DEVICE)
        for i in range(120):
            loop.call(LAUNCH, 8 * NS_PER_US, arg0=FUNCTION + i * 64)
            loop.rest(3 * NS_PER_US)
        _copy(loop, 15 * NS_PER_US, 4, CopyKind.DEVICE_TO_HOST)
        loop.wait(self._prompt_ms * NS_PER_MS)

    def _token(self, loop: Loop, connections: tuple[int, ...]) -> None:
        for i in range(12):
            loop.call(LAUNCH, 8 * NS_PER_US, arg0=FUNCTION + 0x8000 + i * 64)
            loop.rest(3 * NS_PER_US)
        _copy(loop, 15 * NS_PER_US, 4, CopyKind.DEVICE_TO_HOST)
        loop.wait(4 * NS_PER_MS)
        for fd in connections:
            loop.call(_SEND, 5 * NS_PER_US, arg0=fd, arg1=120)


def head_of_line_blocking() -> RecordingBuilder:
    """Three connections get a token every 4 ms, and none for 60 ms whenever a new one brings a prompt."""
    return _Streams(60).build()


def prompts_in_chunks() -> RecordingBuilder:
    """The same with prompts in pieces, none of which lasts much longer than a token."""
    return _Streams(8).build()


def one_request_at_a_time() -> RecordingBuilder:
    """Two connections in turns: what each waits for before its first token is its own prompt."""
    return _Streams(60, is_one_by_one=True).build()


SERVING_FAULTS: Final[dict[str, Callable[[], RecordingBuilder]]] = {
    "decode_outlier": decode_outlier,
    "prefill_outlier": prefill_outlier,
    "kv_cache_pressure": kv_cache_pressure,
    "head_of_line_blocking": head_of_line_blocking,
}
"""A firing recording for each rule about serving."""
