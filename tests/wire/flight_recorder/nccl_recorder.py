"""What PyTorch's recorder holds of an NCCL job with batches, written here as no NCCL job can run without GPUs.

Source: initWork, pointToPoint, collective, startCoalescing and endCoalescing of ProcessGroupNCCL.cpp, and what
test_batched_send_recv and test_coalescing_manager_collective of test_c10d_nccl.py expect (PyTorch 2.7 to 2.13):

- Operations of a batch have entries of their own without events, so they stay "scheduled". The entry
  ``nccl:coalesced`` that ends the batch has the state, and their sequence numbers of both kinds and last ``op_id``.
- A batch counts once, in the numbers of its kind: ``p2p_seq_id`` or ``collective_seq_id``.
- ``is_p2p`` of the end follows from its type, which is no point-to-point one: false. Backends that pass what the batch
  was (as ProcessGroupXCCL.cpp does) may write true.
- ``last_enqueued_collective`` is the number of the last operation of either kind.
"""

import json

CREATED_NS = 1_724_779_239_000_000_000


class NcclRecorder:
    """The recorder of one rank that uses one communicator with all ranks."""

    def __init__(self, rank, n_ranks, *, first_id=0, is_end_p2p=False, created_ns=CREATED_NS):
        self.rank, self.n_ranks, self.first_id, self.is_end_p2p = (
            rank,
            n_ranks,
            first_id,
            is_end_p2p,
        )
        self.created_ns = created_ns
        self.entries = []
        self.collective_seq = self.p2p_seq = self.op_id = 0
        self.enqueued, self.completed = -1, -1

    def all_reduce(self, *, is_done=True):
        """One collective."""
        self.collective_seq += 1
        self._add("nccl:all_reduce", is_p2p=False, is_done=is_done)
        self._count(self.collective_seq, is_done)

    def batch(self, *ops, is_done=True):
        """``batch_isend_irecv``; each operation is ``"send R"`` or ``"recv R"``."""
        self.p2p_seq += 1
        for op in ops:
            kind, peer = op.split()
            arrow = "->" if kind == "send" else "<-"
            self._add(f"nccl:{kind} {self.rank}{arrow}{peer}", is_p2p=True, is_done=False)
        self._end(self.p2p_seq, is_done, is_p2p=self.is_end_p2p)

    def coalesced_collectives(self, n, *, is_done=True):
        """Collectives between ``startCoalescing`` and ``endCoalescing``, such as uneven all-gathers."""
        self.collective_seq += 1
        for _ in range(n):
            self._add("nccl:_broadcast_oop", is_p2p=False, is_done=False)
        self._end(self.collective_seq, is_done, is_p2p=False)

    def write(self, directory):
        """Write the dump as JSON."""
        ranks = json.dumps(list(range(self.n_ranks)))
        body = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
            "pg_status": {
                "0": {
                    "last_enqueued_collective": self.enqueued,
                    "last_started_collective": -1,
                    "last_completed_collective": self.completed,
                }
            },
            "entries": self.entries,
        }
        (directory / f"dump_{self.rank}").write_text(json.dumps(body))

    def _end(self, seq, is_done, *, is_p2p):
        self.op_id -= 1  # the end is no operation
        self._add("nccl:coalesced", is_p2p=is_p2p, is_done=is_done, sizes=[])
        self._count(seq, is_done)

    def _count(self, seq, is_done):
        self.enqueued = seq
        self.completed = seq if is_done else self.completed

    def _add(self, name, *, is_p2p, is_done, sizes=((3, 4),)):
        self.op_id += 1
        record_id = self.first_id + len(self.entries)
        created_ns = self.created_ns + record_id * 1000
        dtypes = ["Float"] * len(sizes)
        self.entries.append({
            "record_id": record_id, "pg_id": 0, "process_group": ["0", "default_pg"],
            "collective_seq_id": self.collective_seq, "p2p_seq_id": self.p2p_seq, "op_id": self.op_id,
            "profiling_name": name, "time_created_ns": created_ns, "input_sizes": sizes, "input_dtypes": dtypes,
            "output_sizes": sizes, "output_dtypes": dtypes, "state": "completed" if is_done else "scheduled",
            "time_discovered_started_ns": None, "time_discovered_completed_ns": created_ns + 500 if is_done else None,
            "retired": is_done, "timeout_ms": 600000, "is_p2p": is_p2p,
        })  # fmt: skip
