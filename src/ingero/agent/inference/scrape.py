"""Reads the metrics of serving engines on this machine, every few seconds, in a thread of its own.

Pages are other people's text: their size is bounded, redirects are not followed, and a page that cannot be read is
counted and reported once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import httpx

from ingero.agent.capture.discover.identity import parse_environment, parse_stat
from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.inference import pages
from ingero.agent.inference.engines import EngineMetric, ServingEngine, find_engine, find_option
from ingero.agent.inference.pages import MAX_TEXT, FollowedModels, Number, SumStarts, read_page
from ingero.agent.metrics.series import Kind, Labels, Series
from ingero.closing import Closing
from ingero.errors import BadDataError, UnsupportedError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

MAX_PAGE_BYTES: Final = 4 << 20
MAX_ENGINES: Final = 64
"""That are read; those that started first."""
MAX_PORTS: Final = 1024
"""Of engines whose readings stay counted while they are away, so that the counts do not fall."""
_TIMEOUT_S: Final = 3.0  # of one answer, from the connection to its last byte
_NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Pages are read by plain HTTP: a client would load the machine's certificates for nothing each time."""
_PORT_DIGITS: Final = 5
_MAX_NAMED: Final = 3
_TICK_NS: Final = NS_PER_S // os.sysconf("SC_CLK_TCK")


class ScrapeOutcome(StrEnum):
    """What became of one reading of a page."""

    TAKEN = "taken"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_METRICS = "unknown_metrics"


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How engines are read.

    Attributes:
        host: Where they listen.
        interval_ns: Between two readings.
        redetect_ns: Between two looks for engines.
    """

    host: str = "127.0.0.1"
    interval_ns: int = 10 * NS_PER_S
    redetect_ns: int = 30 * NS_PER_S


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What the last page said.

    Attributes:
        numbers: By metric and model; none where it could not be read.
        starts: Since when sums count, by model; see `SumStarts`.
    """

    numbers: Mapping[tuple[EngineMetric, str], Number] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class EngineState:
    """One engine that was found.

    Attributes:
        engine: Its kind.
        pid: Its process.
        port: Of its metrics.
        model: As its command line has it; empty when it does not.
        start_ticks: When its process started, in clock ticks since boot; 0 where that is not known, as below.
        started_ns: The same in Unix time.
        reading: The last page.
        models: Which of its models are followed.
        sums: Since when its sums count.
        unreadable: Its metrics that could not be read, of the last page.
        outcomes: Readings so far.
        last: Outcome of the last one; None before the first.
    """

    engine: ServingEngine
    pid: int
    port: int
    model: str
    start_ticks: int = 0
    started_ns: int = 0
    reading: EngineReading = field(default_factory=EngineReading)
    models: FollowedModels = field(default_factory=FollowedModels)
    sums: SumStarts = field(default_factory=SumStarts)
    unreadable: frozenset[str] = frozenset()
    outcomes: dict[ScrapeOutcome, int] = field(default_factory=dict)
    last: ScrapeOutcome | None = None

    @property
    def identity(self) -> tuple[int, int, str]:
        """What differs once another engine has the port."""
        return self.pid, self.start_ticks, self.model


@dataclass(slots=True)
class LeftOut:
    """What was not read, each time that one appeared.

    Attributes:
        n_engines: Engines, because there were too many.
        n_models: Models of engines, for the same reason.
        n_metrics: Metrics of engines whose samples are no numbers.
    """

    n_engines: int = 0
    n_models: int = 0
    n_metrics: int = 0
    _engines: frozenset[tuple[str, int]] = frozenset()

    def take_engines(self, keys: Iterable[tuple[str, int]]) -> int:
        """Count the engines that are not read now; how many of them are new."""
        now = frozenset(keys)
        n_new = len(now - self._engines)
        self.n_engines += n_new
        self._engines = now
        return n_new


def find_engines(pids: Iterable[int], proc: Path = Path("/proc")) -> Iterator[EngineState]:
    """The engines among processes, by their command lines, of each port that which started first; oldest first."""
    found: list[EngineState] = []
    for pid in pids:
        try:
            text = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # ended, or not ours to read
            continue
        arguments = text.rstrip("\0").split("\0")
        engine = find_engine(arguments)
        if engine is None:
            continue
        port = _find_port(engine, arguments, proc / str(pid))
        model = find_option(arguments, engine.model_options)[:MAX_TEXT]
        found.append(EngineState(engine, pid, port, model, *_read_start(pid, proc)))
    ports: set[int] = set()
    for one in sorted(found, key=lambda one: (one.start_ticks, one.pid)):
        if one.port not in ports:
            ports.add(one.port)
            yield one


def _find_port(engine: ServingEngine, arguments: list[str], folder: Path) -> int:
    value = find_option(arguments, engine.port_options)
    if not value and engine.port_variable:
        with contextlib.suppress(OSError):  # ended, or not ours to read
            variables = parse_environment((folder / "environ").read_bytes())
            value = variables.get(engine.port_variable, "")
    # int() refuses numbers of thousands of digits.
    is_port = value.isdecimal() and len(value) <= _PORT_DIGITS and 0 < int(value) < 1 << 16
    return int(value) if is_port else engine.port


def _read_start(pid: int, proc: Path) -> tuple[int, int]:
    """When a process started, in ticks since boot and in Unix time to the second of boot; 0 where that is not known."""
    try:
        _, ticks = parse_stat((proc / str(pid) / "stat").read_text(errors="replace"))
        lines = (proc / "stat").read_text().splitlines()
        boot_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0, 0
    return ticks, boot_s * NS_PER_S + ticks * _TICK_NS


async def _get(url: str) -> tuple[int, bytes]:
    """Status and page; of one that is too large some more than `MAX_PAGE_BYTES`.

    Raises:
        httpx.HTTPError: There was no whole answer in time, or none at all.
        httpx.InvalidURL: There can be none.
    """
    try:
        # The client's own limit is of each piece of an answer, of which there may be a million.
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=_NO_TLS) as client,
            client.stream("GET", url, follow_redirects=False) as response,
        ):
            is_page = response.status_code == httpx.codes.OK
            return response.status_code, await _read_bounded(response) if is_page else b""
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer within {_TIMEOUT_S:g} s") from error


async def _read_bounded(response: httpx.Response) -> bytes:
    page = bytearray()
    async for part in response.aiter_bytes():
        page += part
        if len(page) > MAX_PAGE_BYTES:
            break
    return bytes(page)


class EngineScraper(Closing):
    """Finds and reads engines until it is closed.

    Args:
        settings: Where engines listen, and how often they are searched for and read.
        clock: For the pace of searches.
        report: Called with a sentence when an engine is found, cannot be read, or can be read again.
        pids: Every process there is.

    Raises:
        UnsupportedError: ``prometheus_client`` is not installed.

    Attributes:
        left_out: What was not read.
    """

    def __init__(
        self,
        settings: ScrapeSettings,
        clock: Clock,
        report: Callable[[str], None],
        pids: Callable[[], Iterable[int]] = iter_pids,
    ) -> None:
        try:
            import prometheus_client.parser  # noqa: F401, PLC0415 - an extra that only this needs
        except ImportError as error:
            raise UnsupportedError(
                "reading the metrics of engines needs the package prometheus-client",
                hint="pip install 'ingero[agent]', or --inference-scrape off",
            ) from error
        self.left_out = LeftOut()
        self._settings = settings
        self._clock = clock
        self._report = report
        self._pids = pids
        self._engines: dict[tuple[str, int], EngineState] = {}
        self._outcomes: dict[tuple[str, int], dict[ScrapeOutcome, int]] = {}
        self._searched_ns: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingero-engines", daemon=True)

    @property
    def engines(self) -> tuple[EngineState, ...]:
        """Those that were found, and are not gone, by port."""
        return tuple(sorted(self._engines.values(), key=lambda one: one.port))

    def start(self) -> None:
        """Begin to read, on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for one answer at most, which has three seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.scrape_due()
            self._stop.wait(self._settings.interval_ns / NS_PER_S)

    def scrape_due(self) -> None:
        """Look for engines when it is time, and read those that are known."""
        now_ns = self._clock.mono_ns()
        if self._searched_ns is None or now_ns - self._searched_ns >= self._settings.redetect_ns:
            self._searched_ns = now_ns
            self._search()
        for state in self.engines:
            if self._stop.is_set():
                return
            self._read(state)

    def _search(self) -> None:
        found = [((one.engine.name, one.port), one) for one in find_engines(self._pids())]
        self._engines = {key: self._recognise(key, one) for key, one in found[:MAX_ENGINES]}
        left_out = [key for key, _ in found[MAX_ENGINES:]]
        if self.left_out.take_engines(left_out):
            first = ", ".join(f"{name} on port {port}" for name, port in left_out[:_MAX_NAMED])
            more = ", …" if len(left_out) > _MAX_NAMED else ""
            n = f"{len(left_out)} more engine{'s' * (len(left_out) > 1)}"
            self._report(
                f"the metrics of {n} are not read, as {MAX_ENGINES} are the most: {first}{more}"
            )

    def _recognise(self, key: tuple[str, int], found: EngineState) -> EngineState:
        """What is known of an engine; of another one than before only how its port could be read stays."""
        known = self._engines.get(key)
        if known is not None and known.identity == found.identity:
            return known
        name, port = key
        if known is None:
            self._report(f"{name} (pid {found.pid}): its metrics are read on port {port}")
        else:
            self._report(
                f"{name} (pid {found.pid}): another one than before is read on port {port}"
            )
            found.last = known.last
        found.outcomes = self._outcomes.pop(key, found.outcomes)
        self._outcomes[key] = found.outcomes
        if len(self._outcomes) > MAX_PORTS:
            del self._outcomes[next(iter(self._outcomes))]
        return found

    def _read(self, state: EngineState) -> None:
        outcome, detail = self._fetch(state)
        state.outcomes[outcome] = state.outcomes.get(outcome, 0) + 1
        where = f"{state.engine.name} on port {state.port}"
        if outcome is not ScrapeOutcome.TAKEN:
            state.reading = EngineReading()  # absent is not what it was
            if outcome is not state.last:
                self._report(f"{where}: its metrics are not read: {detail}")
        elif state.last not in {None, ScrapeOutcome.TAKEN}:
            self._report(f"{where}: its metrics are read again")
        state.last = outcome

    def _fetch(self, state: EngineState) -> tuple[ScrapeOutcome, str]:
        url = f"http://{self._settings.host}:{state.port}/metrics"
        try:
            status, page = asyncio.run(_get(url))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return ScrapeOutcome.UNREACHABLE, f"{url}: {error!r}"[:MAX_TEXT]
        if status != httpx.codes.OK:
            return ScrapeOutcome.REFUSED, f"{url} answers {status}"
        if len(page) > MAX_PAGE_BYTES:
            return ScrapeOutcome.TOO_LARGE, f"{url} has over {MAX_PAGE_BYTES} bytes"
        try:
            found = read_page(page.decode(errors="replace"), state.engine)
        except BadDataError as error:
            return ScrapeOutcome.MALFORMED, f"{url}: {error.message}"
        if not found.numbers:
            return ScrapeOutcome.UNKNOWN_METRICS, f"{url} has none of {state.engine.name}'s metrics"
        self._note_unreadable(state, found.unreadable)
        now_ns = self._clock.wall_ns()
        is_known = 0 < found.started_s <= now_ns / NS_PER_S
        started_ns = round(found.started_s * NS_PER_S) if is_known else state.started_ns
        numbers = self._follow_models(state, found.numbers)
        # Both at once: the tracing thread reads them meanwhile.
        state.reading = EngineReading(numbers, state.sums.take(numbers, started_ns, now_ns))
        return ScrapeOutcome.TAKEN, ""

    def _note_unreadable(self, state: EngineState, unreadable: frozenset[str]) -> None:
        fresh = sorted(unreadable - state.unreadable)
        state.unreadable = unreadable
        self.left_out.n_metrics += len(fresh)
        if fresh:
            where = f"{state.engine.name} on port {state.port}"
            self._report(f"{where}: metrics that are no numbers are left out: {', '.join(fresh)}")

    def _follow_models(
        self, state: EngineState, numbers: Mapping[tuple[EngineMetric, str], Number]
    ) -> Mapping[tuple[EngineMetric, str], Number]:
        n_before = state.models.n_left_out
        followed = state.models.take(numbers)
        n_left_out = state.models.n_left_out
        self.left_out.n_models += n_left_out - n_before
        if n_left_out and not n_before:
            where = f"{state.engine.name} on port {state.port}"
            self._report(
                f"{where}: {n_left_out} of its models are not read, as {pages.MAX_MODELS} are the most"
            )
        return followed

    def iter_series(self) -> Iterator[Series]:
        """What the last pages said, and what became of all readings."""
        points: dict[str, list[tuple[Labels, Number]]] = {}
        metrics: dict[str, EngineMetric] = {}
        starts: dict[Labels, int] = {}
        outcomes: list[tuple[Labels, float]] = []
        for state in self.engines:
            where: Labels = (("gen_ai.system", state.engine.name), ("server.port", state.port))
            reading = state.reading
            for (metric, model), number in reading.numbers.items():
                labels = (*where, ("gen_ai.request.model", model or state.model))
                points.setdefault(metric.name, []).append((labels, number))
                metrics[metric.name] = metric
                starts[labels] = reading.starts.get(model, 0)
            outcomes += [
                ((*where, ("outcome", outcome.value)), float(n))
                for outcome, n in sorted(state.outcomes.items())
            ]
        for name in sorted(points):
            yield _build_series(metrics[name], tuple(points[name]), starts)
        if outcomes:
            yield Series(
                "ingero.infer.scrapes", Kind.SUM, "1", "Readings of engines' metrics, by what became of them.",
                tuple(outcomes), "ingero_infer_scrapes_total",
            )  # fmt: skip


def _build_series(
    metric: EngineMetric,
    points: tuple[tuple[Labels, Number], ...],
    starts: Mapping[Labels, int],
) -> Series:
    plain = metric.name.replace(".", "_")
    unit = {"s": "_seconds"}.get(metric.unit, "")
    end = "_total" if metric.kind is Kind.SUM else ""
    return Series(
        metric.name, metric.kind, metric.unit, metric.description, points, f"{plain}{unit}{end}", starts
    )  # fmt: skip
