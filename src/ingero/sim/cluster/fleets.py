"""The Fleets of ``ingero up``: one, or several that act as one over a real nats-server."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from ingero.model.verdicts import ALARMS, IMBALANCES, Judgement
from ingero.otlp.codec import decode_export, iter_log_rows
from ingero.otlp.names import ContentType, Signal
from ingero.sim.cluster.ask import ask_diagnoses, ask_hang
from ingero.sim.cluster.result import Progress
from ingero.sim.launcher import LaunchedProgram
from ingero.sim.local_fleet import ADMIN, OTLP_HTTP, run_local_fleet
from ingero.sim.local_nats import LocalNats
from ingero.sim.replay import ask_judgement
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.verdicts import is_verdict, read_verdict


class RunningFleets:
    """The Fleets, of which some may have been killed.

    Args:
        programs: All of them.
        records: By Fleet, the file of what it exports as logs; none where there is one Fleet.
        clock: Measures a take-over.
    """

    def __init__(
        self, programs: Sequence[LaunchedProgram], records: Sequence[Path], clock: Clock
    ) -> None:
        self._alive = list(programs)
        self._records = records
        self._clock = clock
        self._judge: LaunchedProgram | None = None
        self._killed_ns: int | None = None
        self.urls = [one.url(OTLP_HTTP) for one in programs]

    @property
    def is_killed(self) -> bool:
        """Whether a Fleet was."""
        return self._killed_ns is not None

    def kill_judge(self) -> bool:
        """Kill the Fleet that judged last; False when none has judged yet."""
        if self._judge is None:
            return False
        self._judge.signal(signal.SIGKILL)
        self._alive.remove(self._judge)
        self._judge, self._killed_ns = None, self._clock.mono_ns()
        return True

    def ask(self, client: httpx.Client, cluster_id: str) -> tuple[str, Judgement] | None:
        """Admin address of the Fleet that judges, and what it says; None where none says anything.

        Raises:
            RetryableError: An admin endpoint does not answer.
        """
        for program in self._alive:
            url = program.url(ADMIN)
            judgement = ask_judgement(client, url, cluster_id)
            if judgement is not None:
                self._judge = program
                return url, judgement
        return None

    def find_takeover_s(self) -> float | None:
        """Seconds from the kill until now, if another Fleet judges; None otherwise."""
        if self._killed_ns is None or self._judge is None:
            return None
        return (self._clock.mono_ns() - self._killed_ns) / NS_PER_S

    def list_reports(self) -> list[dict[str, Any]] | None:
        """Every alarm that left any of the Fleets as a record, oldest first; None where there is one Fleet."""
        if not self._records:
            return None
        rows = [
            row
            for path in self._records
            for line in path.read_bytes().splitlines()
            for row in iter_log_rows(decode_export(line, Signal.LOGS, ContentType.JSON))
            if is_verdict(row.event_name)
        ]
        found = [read_verdict(row) for row in sorted(rows, key=lambda row: row.time_unix_nano)]
        return [{"rank": one.rank, "verdict": one.kind} for one in found if one.kind in ALARMS]


class FleetView:
    """What the Fleets say, as their admin endpoints show it.

    Args:
        fleets: The Fleets.
        cluster_id: The cluster.
        client: Asks.
    """

    def __init__(self, fleets: RunningFleets, cluster_id: str, client: httpx.Client) -> None:
        self.fleets = fleets
        self._cluster_id = cluster_id
        self._client = client

    def update(self, progress: Progress) -> None:
        """Ask for verdicts and hangs, and note who is named; while nobody judges, what was said last stays."""
        judged = self.fleets.ask(self._client, self._cluster_id)
        if judged is None:
            return
        url, progress.judgement = judged
        if progress.takeover_s is None:
            progress.takeover_s = self.fleets.find_takeover_s()
        progress.hang = ask_hang(self._client, url, self._cluster_id)
        found = [(v.rank.rank, v.kind.value) for v in progress.judgement.verdicts if v.is_alarm]
        if progress.hang is not None:
            found += [(rank, "hang") for rank in progress.hang["missing_ranks"]]
            for root in progress.hang["roots"]:
                if root["diagnosis"] is not None:
                    answer = (root["diagnosis"], progress.since_fault_ns)
                    progress.diagnoses.setdefault(root["rank"], answer)
        for who in found:
            progress.named.setdefault(who, progress.since_fault_ns)
        is_uneven = any(v.kind in IMBALANCES for v in progress.judgement.verdicts)
        if is_uneven or any(kind in ALARMS for _, kind in progress.named):
            diagnoses = ask_diagnoses(self._client, url, self._cluster_id)
            for rank, (kind, diagnosis) in diagnoses.items():
                known = progress.uneven if kind in IMBALANCES else progress.diagnoses
                known.setdefault(rank, (diagnosis, progress.since_fault_ns))


@contextmanager
def open_fleets(
    n_fleets: int, overrides: Sequence[str], folder: Path, clock: Clock
) -> Iterator[RunningFleets]:
    """Start the Fleets, and end them with the context.

    Raises:
        IngeroError: One did not start.
        UnsupportedError: Several need a nats-server, and there is none.
    """
    with ExitStack() as stack:
        if n_fleets == 1:
            yield RunningFleets([stack.enter_context(run_local_fleet(overrides))], (), clock)
            return
        store = folder / "nats"
        store.mkdir()
        nats = LocalNats(store)
        stack.enter_context(nats.run())
        records = [folder / f"records-{number}.jsonl" for number in range(n_fleets)]
        programs = []
        for path in records:
            own = (
                f"service.storage.nats.servers=[{nats.url}]",
                f"exporters.file.path={path}",
                "exporters.file.flush_interval=50ms",
                "service.pipelines.logs.exporters=[file]",
            )
            programs.append(stack.enter_context(run_local_fleet((*overrides, *own))))
        yield RunningFleets(programs, records, clock)
