"""A processor that gets a job's pushes, and what it says."""

import asyncio

import numpy as np

from ingero.config import parse_model
from ingero.fleet.component import AdminRoutes, ComponentId, PushContext
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.processor import FACTORY
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_protobuf,
    encode_protobuf,
    iter_log_rows,
    iter_points,
)
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import build_collectives

COMM = "00000000000000aa"


def job(
    n_ranks=8,
    n_ops=200,
    *,
    slow=None,
    factor=1.5,
    seed=1,
    comm=COMM,
    cluster="c",
    clock=ClockKind.DEVICE,
):
    """One run per rank of a data-parallel job; ``slow`` takes ``factor`` times as long for its own work."""
    rng = np.random.default_rng(seed)
    own = (10 * NS_PER_MS * (1 + 0.02 * rng.standard_normal((n_ranks, n_ops)))).astype(np.int64)
    if slow is not None:
        own[slow] = (own[slow] * factor).astype(np.int64)
    arrived = own.max(axis=0)
    leave = np.cumsum(arrived + NS_PER_MS)
    runs = []
    for rank in range(n_ranks):
        ops = np.zeros(n_ops, COLLECTIVE_OP)
        ops["seq"] = np.arange(n_ops)
        ops["own_ns"] = own[rank]
        ops["inside_ns"] = arrived - own[rank] + NS_PER_MS
        ops["entry_ns"] = leave - ops["inside_ns"] + 1
        ops["n_bytes"] = 1 << 24
        ops["op"] = CollectiveOp.ALL_REDUCE
        who = Rank(cluster, f"node{rank}", rank, 1, (("dp", str(rank)), ("pp", "0")))
        runs.append(CollectiveRun(who, comm, rank, n_ranks, clock, ops))
    return runs


class Judged:
    """Both pipelines of a started processor; `round` judges at once."""

    def __init__(self, **config):
        self.host = ManualHost()
        self.out = {signal: KeptBatches() for signal in (Signal.LOGS, Signal.METRICS)}
        settings = parse_model(NcclConfig, config)
        self.pipes = {
            signal: FACTORY.create(ComponentId("nccl"), settings, signal, out)
            for signal, out in self.out.items()
        }
        for pipe in self.pipes.values():
            asyncio.run(pipe.start(self.host))
        self.pipe = self.pipes[Signal.LOGS]

    def push(self, runs):
        export = build_collectives(runs, self.host.clock.wall_ns())
        export = decode_protobuf(encode_protobuf(export), Signal.LOGS)
        return self.send(Signal.LOGS, export)

    def send(self, signal, export, hint=""):
        batch = Batch(signal, export, self.host.clock.wall_ns(), PushContext(cluster_hint=hint))
        self.pipes[signal].consume(batch)
        return batch

    def round(self):
        for out in self.out.values():
            out.batches.clear()
        self.pipe._evaluation.run()
        return self

    def points(self, name):
        return [
            point
            for batch in self.out[Signal.METRICS].batches
            for point in iter_points(batch.export)
            if point.name == name
        ]

    def records(self, event="ingero.verdict"):
        return [
            row
            for batch in self.out[Signal.LOGS].batches
            for row in iter_log_rows(batch.export)
            if row.event_name == event
        ]

    def page(self, name, **query):
        for pages in self.host.find(AdminRoutes):
            for route in pages.admin_routes():
                if route.path.endswith(f"/{name}"):
                    return route.read(query)
        raise AssertionError(name)


def judge_after(judged, seconds=6):
    """Judge once operations have had their reorder window."""
    judged.round()
    judged.host.clock.advance(seconds * NS_PER_S)
    return judged.round()


def gauge_push(
    node, duration_ms, *, rank=0, comm=COMM, op="ncclAllReduce", time_ns=5_000, cluster="c"
):
    attributes = {
        "nccl.op_type": op,
        "nccl.comm_id_hash": comm,
        "nccl.rank": rank,
        "nccl.nranks": 4,
    }
    return build_metrics(
        {"ingero.node.id": node, "ingero.cluster.id": cluster},
        [
            build_gauge(
                "nccl.collective.duration_ms",
                [build_number(duration_ms, time_ns, attributes)],
                "ms",
            ),
            build_gauge("nccl.collective.bytes", [build_number(1024, time_ns, attributes)], "By"),
        ],
        "ingero",
    )
