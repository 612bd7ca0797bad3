"""CUDA graphs of one process: what happened to them in order, and how often each is launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import numpy as np

from ingero.errors import BadDataError
from ingero.model.events import EventFlag, Events, GraphOp, Source, op_name
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.causal.exact import Statistics, compute_statistics, share_of_rows
from ingero.recording.causal.watching import find_watched
from ingero.recording.queries.paging import PageArgs, cut_page
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.window import Wanted, format_wall
from ingero.serving.query import Query

RowShare = Annotated[
    float | None,
    msgspec.Meta(description="part of the calls that has a row; null: nobody counted the others"),
]


class GraphArgs(PageArgs, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which process."""

    pid: Annotated[int, msgspec.Meta(description="process")]


class GraphStep(msgspec.Struct, frozen=True):
    """One call."""

    t_s: Annotated[float, msgspec.Meta(description="seconds from the first event")]
    op: str
    d_us: float
    handle: str
    ret: int


class LifecycleAnswer(msgspec.Struct, frozen=True):
    """Captures, instantiations and launches in time order, with totals of every call."""

    steps: list[GraphStep]
    totals: dict[str, int]
    launches_per_capture: float | None
    row_share: RowShare
    next_cursor: str


def _load(context: RecordingFile, args: GraphArgs) -> Recording:
    if args.pids:
        raise BadDataError("graph questions take pid, not pids")
    return context.load(Wanted(since=args.since, pids=(args.pid,)))


def _of_graphs(recording: Recording) -> Events:
    """Graph calls that returned."""
    events = recording.events
    is_done = (events["flags"] & EventFlag.IN_FLIGHT) == 0
    chosen: Events = events[(events["source"] == Source.CUDA_GRAPH) & is_done]
    return chosen


def _count_graphs(recording: Recording) -> list[Statistics]:
    return [one for one in compute_statistics(recording) if one.source == Source.CUDA_GRAPH]


def _sum_calls(counted: Iterable[Statistics]) -> Counter[int]:
    calls: Counter[int] = Counter()
    for one in counted:
        calls[one.op] += one.count
    return calls


def _lifecycle(context: RecordingFile, args: GraphArgs) -> LifecycleAnswer:
    recording = _load(context, args)
    start_ns = recording.window_ns[0]
    counted = _count_graphs(recording)
    calls = _sum_calls(counted)
    steps = [
        GraphStep(
            round((int(e["start_ns"]) - start_ns) / 1e9, 6),
            op_name(Source.CUDA_GRAPH, int(e["op"])),
            round(int(e["duration_ns"]) / 1e3, 1),
            f"{int(e['arg0']) & 0xFFFF_FFFF_FFFF_FFFF:#x}",
            int(e["ret_code"]),
        )
        for e in _of_graphs(recording)
    ]
    page, after = cut_page(steps, args.limit, args.cursor)
    captures = calls[GraphOp.END_CAPTURE]
    return LifecycleAnswer(
        list(page),
        {op_name(Source.CUDA_GRAPH, op): n for op, n in sorted(calls.items()) if n},
        round(calls[GraphOp.LAUNCH] / captures, 2) if captures else None,
        share_of_rows(counted),
        after,
    )


LIFECYCLE = Query(
    name="graph_lifecycle",
    title="CUDA graph lifecycle",
    description="Captures, instantiations and launches of a process in time order, with totals and launches per "
    "capture.",
    args=GraphArgs,
    result=LifecycleAnswer,
    run=_lifecycle,
)


class FrequencyArgs(GraphArgs, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which process, and over how long the rate is taken."""

    window_seconds: Annotated[int, msgspec.Meta(ge=1, description="the newest so many seconds")] = (
        60
    )


class GraphRate(msgspec.Struct, frozen=True):
    """One executable graph."""

    handle: str
    launches: int
    rate_hz: float
    kind: Annotated[
        str,
        msgspec.Meta(description="hot, cold, never-launched; unknown where calls have no row"),
    ]


class FrequencyAnswer(msgspec.Struct, frozen=True):
    """Executable graphs, most launched first: launches that have a row, for no other count tells the graphs apart."""

    graphs: list[GraphRate]
    window_s: float
    row_share: RowShare
    next_cursor: str


def _frequency(context: RecordingFile, args: FrequencyArgs) -> FrequencyAnswer:
    recording = _load(context, args)
    events = _of_graphs(recording)
    share = share_of_rows(one for one in _count_graphs(recording) if one.op == GraphOp.LAUNCH)
    if not len(events):
        return FrequencyAnswer([], 0.0, share, "")
    last_ns = int(events["start_ns"].max())
    first_ns = max(int(events["start_ns"].min()), last_ns - args.window_seconds * 10**9)
    window_s = max((last_ns - first_ns) / 1e9, 1e-9)
    launched = events[(events["op"] == GraphOp.LAUNCH) & (events["start_ns"] >= first_ns)]["arg0"]
    made = events[events["op"] == GraphOp.INSTANTIATE]["arg0"]
    handles, counts = np.unique(launched, return_counts=True)
    rates = dict(zip(handles.tolist(), counts.tolist(), strict=True))
    rates |= {handle: 0 for handle in np.unique(made).tolist() if handle and handle not in rates}
    median = float(np.median(list(rates.values())))
    graphs = [
        GraphRate(
            f"{handle & 0xFFFF_FFFF_FFFF_FFFF:#x}",
            n,
            round(n / window_s, 2),
            _kind(n, window_s, median) if share == 1 else "unknown",
        )
        for handle, n in sorted(rates.items(), key=lambda item: (-item[1], item[0]))
    ]
    page, after = cut_page(graphs, args.limit, args.cursor)
    return FrequencyAnswer(list(page), round(window_s, 3), share, after)


def _kind(launches: int, window_s: float, median: float) -> str:
    if not launches:
        return "never-launched"
    return "hot" if launches >= median and launches / window_s >= 1 else "cold"


FREQUENCY = Query(
    name="graph_frequency",
    title="CUDA graph launch rates",
    description="How often each executable graph of a process is launched, and which never are.",
    args=FrequencyArgs,
    result=FrequencyAnswer,
    run=_frequency,
)


class GraphSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """All graph calls of a part, with or without a row; a mean of none is left out."""

    captures: int
    instantiations: int
    launches: int
    total_events: int
    row_share: RowShare
    avg_capture_dur_us: Annotated[
        float | None, msgspec.Meta(description="of captures of which both calls have a row")
    ] = None
    avg_instantiate_dur_us: float | None = None
    launch_rate_per_sec: float | None = None


def summarise_graphs(recording: Recording) -> GraphSummary:
    """Count the graph calls of every process; a capture lasts from its begin to its thread's next end."""
    counted = _count_graphs(recording)
    calls = _sum_calls(counted)
    launches, made = calls[GraphOp.LAUNCH], calls[GraphOp.INSTANTIATE]
    made_ns = sum(one.total_ns for one in counted if one.op == GraphOp.INSTANTIATE)
    captures = _capture_lengths(_of_graphs(recording))
    span_ns = find_watched(recording).total_ns
    return GraphSummary(
        captures=calls[GraphOp.END_CAPTURE],
        instantiations=made,
        launches=launches,
        total_events=calls.total(),
        row_share=share_of_rows(counted),
        avg_capture_dur_us=round(float(captures.mean()) / 1e3, 1) if len(captures) else None,
        avg_instantiate_dur_us=round(made_ns / made / 1e3, 1) if made else None,
        launch_rate_per_sec=round(launches / (span_ns / 1e9), 2) if launches and span_ns else None,
    )


def _capture_lengths(events: Events) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """From each begin to the end that follows it on the same thread, ns."""
    chosen = events[np.isin(events["op"], (GraphOp.BEGIN_CAPTURE, GraphOp.END_CAPTURE))]
    chosen = chosen[np.lexsort((chosen["start_ns"], chosen["tid"], chosen["node"]))]
    first, second = chosen[:-1], chosen[1:]
    is_pair = (first["op"] == GraphOp.BEGIN_CAPTURE) & (second["op"] == GraphOp.END_CAPTURE)
    is_pair &= (first["tid"] == second["tid"]) & (first["node"] == second["node"])
    ends = second["start_ns"] + second["duration_ns"]
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = (ends - first["start_ns"])[is_pair]
    return lengths


class GraphEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One graph call; handles as hexadecimal text, left out where the call has none."""

    timestamp: str
    pid: int
    op: str
    duration_us: float
    ret_code: int
    comm: str = ""
    stream_handle: str = ""
    graph_handle: str = ""
    exec_handle: str = ""


def list_graph_events(recording: Recording, limit: int = 100) -> list[GraphEvent]:
    """The newest graph calls, oldest first."""
    return [_graph_event(recording, event) for event in _of_graphs(recording)[-limit:]]


def _graph_event(recording: Recording, event: np.void) -> GraphEvent:
    op = int(event["op"])
    names = _HANDLES.get(op, ("", ""))
    handles = {
        name: f"{int(event[field]) & 0xFFFF_FFFF_FFFF_FFFF:#x}"
        for name, field in zip(names, ("arg0", "arg1"), strict=True)
        if name and event[field]
    }
    return GraphEvent(
        timestamp=format_wall(int(event["start_ns"])),
        pid=int(event["pid"]),
        op=op_name(Source.CUDA_GRAPH, op),
        duration_us=round(int(event["duration_ns"]) / 1e3, 1),
        ret_code=int(event["ret_code"]),
        comm=clean(recording.process_names.get((int(event["node"]), int(event["pid"])), "")),
        **handles,
    )


_HANDLES: Final[dict[int, tuple[str, str]]] = {  # what arg0 and arg1 are: see `GraphOp`
    GraphOp.BEGIN_CAPTURE: ("", "stream_handle"),
    GraphOp.END_CAPTURE: ("graph_handle", "stream_handle"),
    GraphOp.INSTANTIATE: ("exec_handle", "graph_handle"),
    GraphOp.LAUNCH: ("exec_handle", "stream_handle"),
}
