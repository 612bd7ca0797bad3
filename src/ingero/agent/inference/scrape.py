"""Reads the metrics of serving engines on this machine, every few seconds, in a thread of its own.

Pages are other people's text: their size and the number of models are bounded, redirects are not followed, and a page
that cannot be read is counted and reported once.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import httpx

from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.inference.engines import EngineMetric, ServingEngine, find_engine, find_option
from ingero.agent.metrics.series import Distribution, Kind, Labels, Series
from ingero.closing import Closing
from ingero.errors import BadDataError, UnsupportedError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

MAX_PAGE_BYTES: Final = 4 << 20
MAX_ENGINES: Final = 64
MAX_MODELS: Final = 16
MAX_TEXT: Final = 256
_TIMEOUT_S: Final = 3.0  # of one answer, from the connection to its last byte
_NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Pages are read by plain HTTP: a client would load the machine's certificates for nothing each time."""
_MODEL_LABELS: Final = ("model_name", "model")
_UNREADABLE: Final = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)
"""What prometheus_client's parser raises on text that is no page, and numbers that are none."""


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


Number = float | Distribution


@dataclass(slots=True)
class EngineState:
    """One engine that was found.

    Attributes:
        engine: Its kind.
        pid: Its process.
        port: Of its metrics.
        model: As its command line has it; empty when it does not.
        numbers: The last page: by metric and model.
        outcomes: Readings so far.
        last: Outcome of the last one; None before the first.
    """

    engine: ServingEngine
    pid: int
    port: int
    model: str
    numbers: Mapping[tuple[EngineMetric, str], Number] = field(default_factory=dict)
    outcomes: dict[ScrapeOutcome, int] = field(default_factory=dict)
    last: ScrapeOutcome | None = None


def find_engines(pids: Iterable[int], proc: Path = Path("/proc")) -> Iterator[EngineState]:
    """The engines among processes, by their command lines, each port once."""
    ports: set[int] = set()
    for pid in sorted(pids):
        try:
            text = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # ended, or not ours to read
            continue
        arguments = text.rstrip("\0").split("\0")
        engine = find_engine(arguments)
        if engine is None:
            continue
        value = find_option(arguments, engine.port_options)
        port = int(value) if value.isdecimal() and 0 < int(value) < 1 << 16 else engine.port
        if port not in ports and len(ports) < MAX_ENGINES:
            ports.add(port)
            model = find_option(arguments, engine.model_options)[:MAX_TEXT]
            yield EngineState(engine, pid, port, model)


def read_page(text: str, engine: ServingEngine) -> dict[tuple[EngineMetric, str], Number]:
    """What is known of a page, by metric and model.

    Samples of one model, such as those of several ranks, are added up; of a share the greatest counts.

    Raises:
        BadDataError: It is no page in Prometheus' text format.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    try:
        samples: dict[str, list[Any]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        found: dict[tuple[EngineMetric, str], Number] = {}
        known: set[str] = set()
        for metric in engine.metrics:
            if metric.name in known:
                continue
            numbers = _read_metric(metric, samples)
            known |= {metric.name} if numbers else set()
            found |= {(metric, model): number for model, number in numbers.items()}
    except _UNREADABLE as error:
        raise BadDataError(f"not a page of metrics: {error!r}"[:MAX_TEXT]) from error
    return found


def _read_metric(metric: EngineMetric, samples: Mapping[str, list[Any]]) -> dict[str, Number]:
    is_histogram = metric.kind is Kind.HISTOGRAM
    name = f"{metric.theirs}_bucket" if is_histogram else metric.theirs
    by_model: dict[str, list[Any]] = {}
    # The parser gives counters that lack it the suffix that OpenMetrics wants.
    for sample in samples.get(name, samples.get(f"{name}_total", [])):
        if metric.only is None or sample.labels.get(metric.only[0]) == metric.only[1]:
            by_model.setdefault(_find_model(sample), []).append(sample)
    some = sorted(by_model)[:MAX_MODELS]
    if is_histogram:
        sums = samples.get(f"{metric.theirs}_sum", ())
        return {
            model: _add_up(by_model[model], [one for one in sums if _is_of(one, metric, model)])
            for model in some
        }
    is_share = metric.name.endswith(".utilization")
    return {
        model: metric.scale
        * (max if is_share else sum)([_read_number(one.value) for one in by_model[model]])
        for model in some
    }


def _find_model(sample: Any) -> str:  # noqa: ANN401 - a type of an optional package
    return next(
        (sample.labels[key][:MAX_TEXT] for key in _MODEL_LABELS if key in sample.labels), ""
    )


def _is_of(sample: Any, metric: EngineMetric, model: str) -> bool:  # noqa: ANN401 - as above
    is_only = metric.only is None or sample.labels.get(metric.only[0]) == metric.only[1]
    return is_only and _find_model(sample) == model


def _read_number(value: float) -> float:
    """A number that can be added up.

    Raises:
        ValueError: It is not finite.
    """
    number = float(value)
    if not abs(number) < float("inf"):
        raise ValueError(f"{value} is not finite")
    return number


def _add_up(buckets: list[Any], sums: list[Any]) -> Distribution:
    """A histogram out of cumulative buckets of several label sets, which have the same bounds."""
    cumulative: dict[float, float] = {}
    for bucket in buckets:
        bound = float(bucket.labels["le"])
        cumulative[bound] = cumulative.get(bound, 0.0) + _read_number(bucket.value)
    bounds = sorted(cumulative)
    if not bounds or bounds[-1] != float("inf"):
        raise ValueError("a histogram without a last bucket")
    counts, before = [], 0.0
    for bound in bounds:
        counts.append(round(cumulative[bound] - before))
        before = cumulative[bound]
    if min(counts) < 0:
        raise ValueError("buckets that are not cumulative")
    total = sum(_read_number(one.value) for one in sums)
    return Distribution(tuple(bounds[:-1]), tuple(counts), total)


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
        self._settings = settings
        self._clock = clock
        self._report = report
        self._pids = pids
        self._engines: dict[tuple[str, int], EngineState] = {}
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
            found = {(one.engine.name, one.port): one for one in find_engines(self._pids())}
            for key, state in found.items():
                if key not in self._engines:
                    self._report(
                        f"{key[0]} (pid {state.pid}): its metrics are read on port {key[1]}"
                    )
            self._engines = {key: self._engines.get(key, one) for key, one in found.items()}
        for state in self.engines:
            if self._stop.is_set():
                return
            self._read(state)

    def _read(self, state: EngineState) -> None:
        outcome, detail = self._fetch(state)
        state.outcomes[outcome] = state.outcomes.get(outcome, 0) + 1
        where = f"{state.engine.name} on port {state.port}"
        if outcome is not ScrapeOutcome.TAKEN:
            state.numbers = {}  # absent is not what it was
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
            numbers = read_page(page.decode(errors="replace"), state.engine)
        except BadDataError as error:
            return ScrapeOutcome.MALFORMED, f"{url}: {error.message}"
        if not numbers:
            return ScrapeOutcome.UNKNOWN_METRICS, f"{url} has none of {state.engine.name}'s metrics"
        state.numbers = numbers
        return ScrapeOutcome.TAKEN, ""

    def iter_series(self) -> Iterator[Series]:
        """What the last pages said, and what became of all readings."""
        points: dict[str, list[tuple[Labels, Number]]] = {}
        metrics: dict[str, EngineMetric] = {}
        outcomes: list[tuple[Labels, float]] = []
        for state in self.engines:
            where: Labels = (("gen_ai.system", state.engine.name), ("server.port", state.port))
            for (metric, model), number in state.numbers.items():
                labels = (*where, ("gen_ai.request.model", model or state.model))
                points.setdefault(metric.name, []).append((labels, number))
                metrics[metric.name] = metric
            outcomes += [
                ((*where, ("outcome", outcome.value)), float(n))
                for outcome, n in sorted(state.outcomes.items())
            ]
        for name in sorted(points):
            yield _build_series(metrics[name], tuple(points[name]))
        if outcomes:
            yield Series(
                "ingero.infer.scrapes", Kind.SUM, "1", "Readings of engines' metrics, by what became of them.",
                tuple(outcomes), "ingero_infer_scrapes_total",
            )  # fmt: skip


def _build_series(metric: EngineMetric, points: tuple[tuple[Labels, Number], ...]) -> Series:
    plain = metric.name.replace(".", "_")
    unit = {"s": "_seconds"}.get(metric.unit, "")
    end = "_total" if metric.kind is Kind.SUM else ""
    return Series(
        metric.name, metric.kind, metric.unit, metric.description, points, f"{plain}{unit}{end}"
    )
