"""``ingero trace --inference``: its options, and what it prints of programs that serve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import click

from ingero.cli.options import FiniteRange, duration, option
from ingero.model.untrusted import clean
from ingero.units import NS_PER_MS, format_duration, format_size

if TYPE_CHECKING:
    from rich.table import Table

    from ingero.agent.inference.pages import Number
    from ingero.agent.inference.scrape import EngineScraper, EngineState
    from ingero.agent.inference.watch import InferenceSettings, InferenceWatch, StepOutlier

MIN_RATIO: Final = 2.0
MAX_SHOWN: Final = 8
MAX_NOTE: Final = 512
SHOWN_GAUGES: Final = (
    "gen_ai.server.batch.size",
    "gen_ai.server.queue.size",
    "gen_ai.server.kv_cache.utilization",
)
_UINT64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """Whether and how programs that serve a model are watched."""

    section: ClassVar = "inference"

    inference: bool = option(
        "Tell the steps of programs that serve a model: prefill, decode, those that take far too long, and why.",
        default=False,
    )
    inference_warmup: int = option(
        "Steps to see before a phase is named or a step is too long.",
        default=30,
        type=click.IntRange(5, 512),
    )
    inference_outlier_ratio: float = option(
        "Times the 95th percentile, from which a step counts as 3x too long; 1.5x and 2x are reported as well.",
        default=3.0,
        type=FiniteRange(MIN_RATIO),
    )
    inference_kvcache_top_n: int = option(
        "Oldest allocations that are reported with a step that takes too long.",
        default=5,
        type=click.IntRange(0, 100),
    )
    inference_kvcache_max_per_pid: int = option(
        "Allocations that are followed of one process.",
        default=8192,
        type=click.IntRange(1, 1 << 20),
    )

    inference_scrape: str = option(
        "Whether the metrics of vLLM, SGLang, TGI and Triton that run here are read.",
        default="auto",
        type=click.Choice(("auto", "off")),
        keys=("inference.scrape_engines",),
    )
    inference_scrape_interval: int = duration(
        "Between two readings.", default="10s", at_least="100ms"
    )
    inference_scrape_host: str = option("Where engines listen.", default="127.0.0.1")
    inference_scrape_redetect_interval: int = duration(
        "Between two looks for engines.", default="30s", at_least="100ms"
    )

    def open_scraper(
        self, stack: contextlib.ExitStack, notify: Callable[[str], None]
    ) -> EngineScraper | None:
        """Read engines until the stack ends; None where that is not wanted."""
        if not self.inference or self.inference_scrape == "off":
            return None
        from ingero.agent.inference.scrape import EngineScraper, ScrapeSettings
        from ingero.telemetry.clock import SystemClock

        settings = ScrapeSettings(
            self.inference_scrape_host,
            self.inference_scrape_interval,
            self.inference_scrape_redetect_interval,
        )
        scraper = EngineScraper(
            settings, SystemClock(), lambda text: notify(f"note: {clean(text, MAX_NOTE)}")
        )
        stack.callback(scraper.close)
        scraper.start()
        return scraper

    def build(self) -> InferenceSettings:
        """As the watch takes them."""
        from ingero.agent.inference.watch import InferenceSettings

        return InferenceSettings(
            warmup=self.inference_warmup,
            outlier_ratio=self.inference_outlier_ratio,
            top_n=self.inference_kvcache_top_n,
            max_per_pid=self.inference_kvcache_max_per_pid,
        )


def build_outlier_line(outlier: StepOutlier) -> dict[str, Any]:
    """A line of type ``inference_outlier``; its fields are those of the message of that name where there is one."""
    import msgspec

    line: dict[str, Any] = {
        "type": "inference_outlier",
        "pid": outlier.pid,
        "process_name": outlier.process,
        "stream_handle": outlier.stream & _UINT64,
        "phase": outlier.phase,
        "step_duration_ns": outlier.duration_ns,
        "baseline_p95_ns": outlier.p95_ns,
        "baseline_mean_ns": outlier.mean_ns,
        "bucket": outlier.bucket,
        "causes": msgspec.to_builtins(outlier.causes),
    }
    if outlier.cgroup_path_hash:
        line["cgroup_path_hash"] = outlier.cgroup_path_hash
    if outlier.ages_ms:
        line["kv_cache_top_alloc_ages_ms"] = list(outlier.ages_ms)
    if outlier.rank is not None:
        line["rank"] = outlier.rank
    return line


def describe_outlier(outlier: StepOutlier) -> str:
    """The same in a line for people."""
    causes = ", ".join(f"{clean(cause.name)} {cause.share:.0%}" for cause in outlier.causes)
    return (
        f"[{outlier.bucket}] a {outlier.phase} step took {format_duration(outlier.duration_ns)}, p95 is"
        f" {format_duration(outlier.p95_ns)}: {causes} ({clean(outlier.process)}, pid {outlier.pid})"
    )


def iter_phase_lines(
    watch: InferenceWatch, engines: EngineScraper | None = None
) -> Iterator[dict[str, Any]]:
    """Lines of type ``inference``: one per stream and phase, then one of what was not followed."""
    from ingero.agent.inference.series import read_losses
    from ingero.detect.inference.baseline import BUCKETS

    for pid, stream, phase, workload in watch.iter_phases():
        record = workload.phases[phase]
        yield {
            "type": "inference",
            "pid": pid,
            "process_name": watch.find_name(pid),
            "stream_handle": stream & _UINT64,
            "phase": phase,
            "steps": record.baseline.n_steps,
            "total_ns": record.total_ns,
            "baseline_mean_ns": round(record.baseline.mean_ns),
            "baseline_p50_ns": round(record.baseline.median_ns),
            "baseline_p95_ns": round(record.baseline.p95_ns),
            "outliers": dict(zip(BUCKETS[1:], record.outliers[1:].tolist(), strict=True)),
        }
    yield {"type": "inference_lost", **read_losses(watch, engines)}


def draw_phases(watch: InferenceWatch) -> Iterator[Table]:
    """A table of the streams with the most steps; nothing before the first step."""
    from rich.table import Table

    found = sorted(watch.iter_phases(), key=lambda one: -one[3].phases[one[2]].baseline.n_steps)[
        :MAX_SHOWN
    ]
    if not found:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("inference", no_wrap=True)
    for name in ("stream", "phase", "steps", "p50", "p95", "too long"):
        table.add_column(name, justify="left" if name in {"stream", "phase"} else "right")
    for pid, stream, phase, workload in found:
        record = workload.phases[phase]
        table.add_row(
            f"{clean(watch.find_name(pid))} ({pid})",
            f"{stream & _UINT64:#x}",
            phase,
            str(record.baseline.n_steps),
            format_duration(record.baseline.median_ns),
            format_duration(record.baseline.p95_ns),
            str(int(record.outliers[1:].sum())),
        )
    yield table


def describe_memory(watch: InferenceWatch) -> str:
    """How much device memory is held and for how long, in a line; empty where none was allocated."""
    held, counts = watch.allocations.held, watch.counts
    n_released = int(counts.ages.sum())
    if not len(held) and not n_released:
        return ""
    held_text = (
        f"device memory: {len(held)} allocations held, {format_size(int(held['bytes'].sum()))}"
    )
    if not n_released:
        return held_text
    mean_ns = counts.ages_total_ms * NS_PER_MS / n_released
    return f"{held_text}; {n_released} released after {format_duration(mean_ns)} on average"


def build_engine_line(state: EngineState) -> dict[str, Any]:
    """A line of type ``inference_engine``: what one engine's metrics said last, and what became of all readings."""
    return {
        "type": "inference_engine",
        "engine": state.engine.name,
        "pid": state.pid,
        "port": state.port,
        "scrapes": {outcome.value: n for outcome, n in sorted(state.outcomes.items())},
        "metrics": [
            {
                "name": metric.name,
                "model": model or state.model,
                "unit": metric.unit,
                **_build_number(number),
            }
            for (metric, model), number in state.reading.numbers.items()
        ],
    }


def _build_number(number: Number) -> dict[str, float]:
    if isinstance(number, float | int):
        return {"value": number}
    return {"count": sum(number.counts), "sum": number.total}


def describe_engine(state: EngineState) -> str:
    """The same in a line for people: means of its histograms, and what waits, of its first models."""
    parts = []
    found = state.reading.numbers
    models = list(dict.fromkeys(model for _, model in found))
    shown = set(models[:MAX_SHOWN])
    for (metric, model), number in found.items():
        if model not in shown:
            continue
        name = metric.name.removeprefix("gen_ai.").removeprefix("server.")
        of = f" {clean(model)}" if model else ""
        if isinstance(number, float | int):
            if metric.name in SHOWN_GAUGES:
                parts.append(f"{name}{of} {number:.3g}")
        elif n := sum(number.counts):
            parts.append(f"{name}{of} {format_duration(number.total * 1e9 / n)}")
    from ingero.agent.inference.scrape import ScrapeOutcome

    taken = state.outcomes.get(ScrapeOutcome.TAKEN, 0)
    rest = sum(state.outcomes.values()) - taken
    failed = f", {rest} failed" if rest else ""
    numbers = ", ".join(parts) or "no number yet"
    if len(models) > MAX_SHOWN:
        numbers += f", {len(models) - MAX_SHOWN} more models"
    return f"{state.engine.name} (pid {state.pid}, port {state.port}): {taken} readings{failed}; {numbers}"
