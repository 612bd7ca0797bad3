"""One traced rank that steps, and a transport that hears what its agent sends."""

import numpy as np

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.collectives.host import CollectiveTracker
from ingero.agent.collectives.push import CollectivePusher, PushPace
from ingero.agent.collectives.run_queue import RunQueue
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import PushReply
from ingero.model.events import CudaOp, NcclOp, Source
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import read_collectives
from ingero.wire.progress import read_progress

STEP_NS = 50 * NS_PER_MS
PID = 42


class Ear:
    """A transport that keeps what it was given, and may refuse."""

    def __init__(self):
        self.is_taking = True
        self.is_there = True
        self.reply = {}
        self.n_rejected = 0
        self.exports = []

    def send(self, export, wall_ns):
        self.exports.append(decode_protobuf(encode_protobuf(export), export.signal))
        reply = {"is_cut_off": not self.is_there} | self.reply
        taken = {"n_rejected": self.n_rejected}
        return PushReply(is_taken=self.is_taking, detail="", **(taken if self.is_taking else reply))

    def close(self):
        pass

    def take(self):
        exports, self.exports = self.exports, []
        runs = [run for export in exports for run in read_collectives(export).runs]
        standings = [one for export in exports for one in read_progress(export).found]
        return runs, standings


class Job:
    """One traced rank that steps."""

    def __init__(self, spill=None, clock=None, interval_s=5):
        self.clock = clock or ManualClock()
        self.ear = Ear()
        identity = NodeIdentity(cluster_id="c", node_id="n", workload_type="training")
        pace = PushPace(interval_ns=interval_s * NS_PER_S, early_gap_ns=NS_PER_S)
        self.pusher = CollectivePusher(
            identity,
            RunQueue(self.ear, self.clock, pace.interval_ns, spill),
            CollectiveTracker(),
            self.clock,
            pace,
        )
        self.pusher.note_process(PID, 3)
        self.seq = 0

    def enter(self, pid=PID, comm=0xAB):
        self.seq += 1
        record = np.zeros(1, get_dtype("collective"))
        record["header"]["mono_ns"] = self.clock.mono_ns()
        record["seq"], record["stream"], record["comm_hash"] = self.seq, 7, comm
        record["pid"], record["rank"], record["nranks"] = pid, 1, 4
        record["op"] = NcclOp.ALL_REDUCE
        self.pusher.add_collectives(record)

    def enter_unknown(self):
        """On a communicator that was made before the probes."""
        record = np.zeros(1, get_dtype("collective"))
        record["pid"], record["source"], record["op"] = PID, Source.NCCL, NcclOp.ALL_REDUCE
        self.pusher.add_collectives(record)

    def destroy(self, comm=0xAB):
        record = np.zeros(1, get_dtype("collective"))
        record["header"]["mono_ns"], record["comm_hash"] = self.clock.mono_ns(), comm
        record["pid"], record["source"], record["op"] = PID, Source.NCCL, NcclOp.COMM_DESTROY
        self.pusher.add_collectives(record)

    def leave(self, inside_ns, pid=PID):
        record = np.zeros(1, get_dtype("call"))
        record["header"]["mono_ns"] = self.clock.mono_ns() + 1
        record["duration_ns"], record["stream"], record["pid"] = inside_ns, 7, pid
        record["source"], record["op"] = Source.CUDA, CudaOp.STREAM_SYNC
        self.pusher.add_calls(record)
        self.clock.advance(inside_ns + 1)

    def run(self, seconds, own_ns=STEP_NS, inside_ns=2 * NS_PER_MS, pid=PID):
        ends_ns = self.clock.mono_ns() + seconds * NS_PER_S
        while self.clock.mono_ns() < ends_ns:
            self.clock.advance(own_ns)
            self.enter(pid)
            self.leave(inside_ns, pid)
            self.pusher.push_due()

    def stand(self, seconds):
        for _ in range(round(seconds * 5)):
            self.clock.advance(NS_PER_S // 5)
            self.pusher.push_due()

    def use_groups(self, n_groups, first):
        """Make so many groups one after the other, each for a few operations."""
        for comm in range(first, first + n_groups):
            self.seq = 0
            for _ in range(2):
                self.clock.advance(STEP_NS)
                self.enter(comm=comm)
                self.leave(NS_PER_MS)
            self.pusher.push_due()
            self.ear.take()


def seqs(runs):
    return [seq for run in runs for seq in run.ops["seq"].tolist()]
