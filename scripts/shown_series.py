"""The metrics of the agent, sink, alerter and remediator, asked of the code that shows them, with nothing measured."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from ingero.agent.capture.kernel.abi import N_COPY_KINDS, get_dtype
from ingero.agent.capture.totals import Totals
from ingero.agent.events.alert.delivery import DeliveryCounts
from ingero.agent.events.alert.page import AlerterPage
from ingero.agent.events.sink import SinkState
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.inference.engines import SGLANG, TGI, TRITON, VLLM
from ingero.agent.inference.scrape import EngineReading, EngineScraper, ScrapeOutcome
from ingero.agent.inference.series import iter_inference_series
from ingero.agent.inference.watch import InferenceSettings, InferenceWatch
from ingero.agent.metrics.exporting import OtlpPusher
from ingero.agent.metrics.gpus import GpuWatch
from ingero.agent.metrics.hardware import iter_hardware_series
from ingero.agent.metrics.health import HealthSeries
from ingero.agent.metrics.machine import Machine
from ingero.agent.metrics.nccl import NcclProcesses
from ingero.agent.metrics.recent import RecentDurations
from ingero.agent.metrics.series import Kind, Series, iter_call_series
from ingero.agent.trace.incidents import IncidentWatch
from ingero.agent.trace.recorder import Recorder
from ingero.remediation.audit import AuditCounts
from ingero.remediation.journal import Journal
from ingero.remediation.messages import MessageCounts
from ingero.remediation.page import RemediatorPage
from ingero.remediation.remediator import RemediatorCounts
from ingero.telemetry.clock import SystemClock


class Shown(NamedTuple):
    """A metric on a page.

    Attributes:
        name: As Prometheus has it.
        kind: Its type there.
        meaning: Its help.
        by: Which option shows it; empty where it is always there.
    """

    name: str
    kind: str
    meaning: str
    by: str = ""


_KINDS: Final = {
    Kind.GAUGE: "gauge",
    Kind.SUM: "counter",
    Kind.UP_DOWN: "gauge",
    Kind.HISTOGRAM: "histogram",
}
_HELP: Final = re.compile(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)$", re.MULTILINE)
_ENGINES: Final = (VLLM, SGLANG, TGI, TRITON)


def list_shown(program: str) -> list[Shown]:
    """What a program shows, by name: ``agent``, ``sink``, ``alerter`` or ``remediator``."""
    shown = {
        "agent": _list_agent,
        "sink": _list_sink,
        "alerter": _list_alerter,
        "remediator": _list_remediator,
    }
    return sorted(set(shown[program]()))


def _list_agent() -> Iterator[Shown]:
    for by, series in (
        ("", iter_call_series(_build_totals(), {})),
        ("", [RecentDurations().take(_build_totals())]),
        ("", _iter_machine()),
        ("", GpuWatch(_nothing(), SystemClock()).iter_series()),
        ("", NcclProcesses().iter_series()),
        (
            "",
            Recorder.iter_series(
                _nothing(
                    writer=_nothing(
                        path=Path("/nonexistent"), counters=_nothing(events_pruned=0, events_lost=0)
                    )
                )
            ),
        ),
        ("", IncidentWatch.iter_series(_nothing(_counts={}))),
        ("--otlp", OtlpPusher.iter_series(_nothing(n_pushed=0, n_failed=0))),
        ("--hw-metrics", iter_hardware_series(())),
        ("--fleet", _iter_health()),
        ("--inference", iter_inference_series(InferenceWatch(InferenceSettings(), lambda _: None))),
        ("--inference", _iter_engines()),
    ):
        yield from (
            Shown(one.prometheus_name, _name_kind(one), one.description, by) for one in series
        )


def _name_kind(series: Series) -> str:
    """Prometheus wants counters to end in ``_total``; the existing agent's others are shown without a type."""
    is_untyped = series.kind is Kind.SUM and not series.prometheus_name.endswith("_total")
    return "counter, shown without a type" if is_untyped else _KINDS[series.kind]


def _nothing(**known: object) -> Any:  # noqa: ANN401 - stands in for what only keeps numbers
    return SimpleNamespace(**known)


def _build_totals() -> Totals:
    keys, counts = np.zeros(0, get_dtype("count_key")), np.zeros(0, get_dtype("count"))
    return Totals(
        mono_ns=0, wall_ns=0, elapsed_ns=1, keys=keys, counts=counts, changes=counts, losses={},
        in_flight=np.zeros(0, [("pid", "<u4")]), keep_one_in=1, copies=np.zeros(N_COPY_KINDS, get_dtype("count")),
    )  # fmt: skip


def _iter_machine() -> Iterator[Series]:
    """Two samples: the first knows no share of the processors."""
    machine = Machine()
    machine.sample()
    time.sleep(0.05)
    machine.sample()
    return machine.iter_series()


def _iter_health() -> Iterator[Series]:
    health = HealthSeries()
    sample = _nothing(score=1.0, applied=_nothing(mode=None))
    health.note(_nothing(cache=_nothing(is_reachable=True)), sample, CollectiveCounts())
    return health.iter_series()


def _iter_engines() -> Iterator[Series]:
    """Every engine, as if each had told all that we read."""
    engines = [
        _nothing(
            engine=engine, port=0, model="", outcomes=Counter({ScrapeOutcome.TAKEN: 1}),
            reading=EngineReading({(metric, ""): 0.0 for metric in engine.metrics}),
        )
        for engine in _ENGINES
    ]  # fmt: skip
    return EngineScraper.iter_series(_nothing(engines=engines))


def _list_sink() -> Iterator[Shown]:
    return _read_page(SinkState(SystemClock(), max_nodes=1).render())


def _list_alerter() -> Iterator[Shown]:
    episodes = _nothing(is_connected=False, n_open=0, n_bad=0, n_evicted=0)
    return _read_page(AlerterPage(episodes, {"webhook": DeliveryCounts()}).render())


def _list_remediator() -> Iterator[Shown]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        with Journal(path, is_audited=True):
            page = RemediatorPage(
                RemediatorCounts(), path, AuditCounts(), messages=MessageCounts()
            ).render()
    return _read_page(page)


def _read_page(text: str) -> Iterator[Shown]:
    return (Shown(name, kind, description) for name, description, kind in _HELP.findall(text))
