"""One question to many nodes at once, over their dashboards' API.

A node that does not answer is named with its reason and never looks like a node with no rows. Each node's clock offset
is estimated and shown: rows are not shifted by it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import httpx
import msgspec

from ingero.config import Endpoint
from ingero.config.tls import TlsClientConfig
from ingero.errors import BadDataError, ConfigError, RetryableError
from ingero.model.untrusted import clean
from ingero.serving.columns import number_repeats
from ingero.serving.tls import build_client_context
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S, format_duration, format_size

_CLOCK_SAMPLES: Final = 3
_JSON_BODY: Final = {"content-type": "application/json"}
_MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FanoutSettings:
    """How nodes are asked.

    Attributes:
        token: Bearer of every node; empty for none.
        timeout_ns: Longest wait for one node, the estimate of its clock included.
        tls: Client side of TLS; ``insecure`` speaks plain HTTP, to loopback only.
    """

    token: str = ""
    timeout_ns: int = 5 * NS_PER_S
    tls: TlsClientConfig | None = None


class NodeAnswer(msgspec.Struct, frozen=True):
    """What one node said.

    Attributes:
        node: The address that was asked.
        error: Why there is no answer; empty when there is one.
        body: The decoded answer, or None.
        clock_offset_ms: The node's wall clock minus this machine's, or None when it could not be estimated.
        round_trip_ms: Shortest round trip of the estimate: the offset is no better than half of it.
    """

    node: str
    error: str = ""
    body: Any = None
    clock_offset_ms: float | None = None
    round_trip_ms: float | None = None


def ask_nodes(
    nodes: Sequence[str], path: str, body: object | None, settings: FanoutSettings,
    clock: Clock | None = None, decode: Callable[[bytes], Any] = msgspec.json.decode,
) -> list[NodeAnswer]:  # fmt: skip
    """Ask every node at once, in the order given.

    Args:
        nodes: ``host:port`` each.
        path: Below ``/api/v1/``.
        body: What to POST; None asks with GET.
        settings: Token, longest wait and TLS.
        clock: For the clock offsets.
        decode: What an answer's bytes are; may raise `BadDataError`.

    Raises:
        ConfigError: There is no address, one is not one or stands there twice, or plain HTTP would leave this machine.
        RetryableError: No node answered; the message names each with its reason.
    """
    endpoints = [_parse(node) for node in nodes]
    if not endpoints:
        raise ConfigError("--nodes names no node", hint="such as --nodes gpu-1:8443,gpu-2:8443")
    twice = [str(one) for at, one in enumerate(endpoints) if one in endpoints[:at]]
    if twice:
        raise ConfigError(f"--nodes names {twice[0]} twice, whose rows would count twice")
    tls = settings.tls or TlsClientConfig()
    if tls.insecure and not all(endpoint.is_loopback for endpoint in endpoints):
        raise ConfigError("plain HTTP to other machines is refused", hint="leave out --no-tls")
    asked = _Asked(path, body, decode, clock or SystemClock(), settings.timeout_ns)
    answers = asyncio.run(_ask_all(endpoints, asked, settings))
    if all(answer.error for answer in answers):
        reasons = "; ".join(f"{answer.node}: {answer.error}" for answer in answers)
        raise RetryableError(
            f"no node answered: {reasons}", hint="is `ingero dashboard` running there?"
        )
    return answers


def _parse(node: str) -> Endpoint:
    try:
        endpoint = Endpoint.parse(node)
    except ValueError as error:
        raise ConfigError(f"--nodes: {error}") from error
    if not endpoint.host or not endpoint.port:
        raise ConfigError(f"--nodes: {node!r} names no host and port")
    try:
        _ = httpx.URL(f"https://{endpoint}").host  # decodes it
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"--nodes: {node!r} is no name of a host: {error}") from error
    return endpoint


@dataclass(frozen=True, slots=True)
class _Asked:
    path: str
    body: object | None
    decode: Callable[[bytes], Any]
    clock: Clock
    timeout_ns: int


async def _ask_all(
    endpoints: Sequence[Endpoint], asked: _Asked, settings: FanoutSettings
) -> list[NodeAnswer]:
    tls = settings.tls or TlsClientConfig()
    verify: ssl.SSLContext | bool = False if tls.insecure else build_client_context(tls)
    headers = {"accept-encoding": "identity"}  # what arrives is what is counted
    if settings.token:
        headers["authorization"] = f"Bearer {settings.token}"
    scheme = "http" if tls.insecure else "https"
    async with httpx.AsyncClient(
        verify=verify, headers=headers, timeout=settings.timeout_ns / NS_PER_S, trust_env=False
    ) as client:
        return await asyncio.gather(
            *(_ask_one(client, f"{scheme}://{e}/api/v1/", str(e), asked) for e in endpoints)
        )


async def _ask_one(client: httpx.AsyncClient, base: str, node: str, asked: _Asked) -> NodeAnswer:
    given = None if asked.body is None else msgspec.json.encode(asked.body)
    try:
        async with asyncio.timeout(asked.timeout_ns / NS_PER_S):
            offset, round_trip = await _clock_offset(client, base, asked.clock)
            content = _decode(*await _fetch(client, base + asked.path, given), asked.decode)
    except (TimeoutError, httpx.TimeoutException):
        return NodeAnswer(node, f"no whole answer within {format_duration(asked.timeout_ns)}")
    except httpx.HTTPError as error:
        return NodeAnswer(node, str(error) or type(error).__name__)
    except BadDataError as error:
        return NodeAnswer(node, error.message)
    return NodeAnswer(node, "", content, offset, round_trip)


async def _fetch(
    client: httpx.AsyncClient, url: str, body: bytes | None = None
) -> tuple[httpx.Response, bytes]:
    """An answer and its bytes, no more than `_MAX_ANSWER_BYTES` of which are ever held.

    Raises:
        BadDataError: There are more.
    """
    method, headers = ("GET", None) if body is None else ("POST", _JSON_BODY)
    content = bytearray()
    async with client.stream(method, url, content=body, headers=headers) as answer:
        async for part in answer.aiter_raw():
            content += part
            if len(content) > _MAX_ANSWER_BYTES:
                most = format_size(_MAX_ANSWER_BYTES)
                raise BadDataError(f"its answer is over {most}: ask for less time or fewer rows")
    return answer, bytes(content)


def _decode(
    answer: httpx.Response,
    content: bytes,
    decode: Callable[[bytes], Any] = msgspec.json.decode,
) -> Any:  # noqa: ANN401 -- what the path answers
    try:
        if answer.is_error:
            fault = msgspec.json.decode(content, type=dict[str, Any])
            raise BadDataError(
                f"HTTP {answer.status_code}: {fault.get('error', 'no reason given')}"
            )
        return decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"HTTP {answer.status_code}, not what was asked for") from error


async def _clock_offset(client: httpx.AsyncClient, base: str, clock: Clock) -> tuple[float, float]:
    """(offset, shortest round trip) in ms: the median of three exchanges, each against its own midpoint."""
    offsets, trips = [], []
    for _ in range(_CLOCK_SAMPLES):
        sent_ns, began_ns = clock.wall_ns(), clock.mono_ns()
        content = _decode(*await _fetch(client, base + "time"))
        trip_ns = clock.mono_ns() - began_ns
        theirs = content.get("timestamp_ns") if isinstance(content, dict) else None
        if not isinstance(theirs, int):
            raise BadDataError("its clock answers without a time")
        offsets.append((theirs - (sent_ns + trip_ns // 2)) / 1e6)
        trips.append(trip_ns / 1e6)
    return round(median(offsets), 3), round(min(trips), 3)


@dataclass(frozen=True, slots=True)
class FanoutRows:
    """Rows of every node that answered alike.

    Attributes:
        columns: ``node`` first, then those of the first answer; a ``node`` among them is ``node_2``.
        rows: In the order of the nodes.
        warnings: Nodes that failed, answered with other columns, lack rows, or whose clock is off.
    """

    columns: list[str]
    rows: list[list[Any]]
    warnings: list[str]


class _SqlAnswer(msgspec.Struct, frozen=True):
    columns: list[str]
    rows: list[list[Any]]
    truncated: bool = False
    missing: str = ""


def _read_rows(body: object) -> _SqlAnswer | None:
    """A node's rows; None where it sent something else."""
    try:
        sent = msgspec.convert(body, _SqlAnswer)
    except msgspec.ValidationError:
        return None
    return sent if all(len(row) == len(sent.columns) for row in sent.rows) else None


def join_rows(answers: Sequence[NodeAnswer], skew_ms: float) -> FanoutRows:
    """Put the SQL answers of many nodes into one table; a node with other columns is left out and named."""
    columns: list[str] = []
    rows: list[list[Any]] = []
    warnings = [
        *(f"{a.node}: {a.error}" for a in answers if a.error),
        *clock_warnings(answers, skew_ms),
    ]
    for answer in answers:
        if answer.error:
            continue
        sent = _read_rows(answer.body)
        if sent is None:
            warnings.append(f"{answer.node}: left out, it answers in another shape")
            continue
        columns = columns or sent.columns
        if sent.columns != columns:
            warnings.append(f"{answer.node}: left out, its columns differ")
            continue
        rows += [[answer.node, *row] for row in sent.rows]
        if sent.truncated:
            warnings.append(f"{answer.node}: there are more rows than the limit")
        if sent.missing:
            warnings.append(f"{answer.node}: {clean(sent.missing, 512)}")
    return FanoutRows(number_repeats(["node", *columns]), rows, warnings)


def clock_warnings(answers: Sequence[NodeAnswer], skew_ms: float) -> list[str]:
    """Nodes whose clock is off by more than a threshold beyond what the round trip leaves open."""
    return [
        f"{a.node}: its clock is {a.clock_offset_ms:+.1f} ms off (round trip {a.round_trip_ms:.1f} ms)"
        for a in answers
        if a.clock_offset_ms is not None
        and a.round_trip_ms is not None
        and abs(a.clock_offset_ms) - a.round_trip_ms / 2 > skew_ms
    ]


def clock_line(answers: Sequence[NodeAnswer]) -> str:
    """The estimated clock offset of every node that answered, in one line."""
    offsets = ", ".join(
        f"{a.node} {a.clock_offset_ms:+.1f} ms" for a in answers if a.clock_offset_ms is not None
    )
    return f"clocks against this machine: {offsets}"
