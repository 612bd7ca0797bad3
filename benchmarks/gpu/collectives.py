"""Ranks of one communicator, one on each device of this machine; run by an interpreter with torch and NCCL.

On a machine with one device two ranks share it. NCCL refuses that to ranks of one host, so each says that it is on a
host of its own (``NCCL_HOSTID``), and they talk through sockets.

``collectives.py N`` runs N all-reduces a rank, prints one JSON object, and waits for a line before it ends.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_rank(rank, n_ranks, n_operations, store, ready):
    if torch.cuda.device_count() < n_ranks:
        os.environ["NCCL_HOSTID"] = str(rank)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(n_operations):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    ready.wait()  # all ranks are through: their last operations are told
    ready.wait()  # the parent got its line
    dist.destroy_process_group()


def main():
    n_ranks, n_operations = max(torch.cuda.device_count(), 2), int(sys.argv[1])
    context = mp.get_context("spawn")
    ready = context.Barrier(n_ranks + 1)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        ranks = [
            context.Process(target=run_rank, args=(rank, n_ranks, n_operations, store, ready))
            for rank in range(n_ranks)
        ]
        for one in ranks:
            one.start()
        ready.wait()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        said = {"pids": [one.pid for one in ranks], "n_ranks": n_ranks, "nccl": nccl}
        print(json.dumps(said), flush=True)
        sys.stdin.readline()
        ready.wait()
        for one in ranks:
            one.join()
    sys.exit(max(abs(one.exitcode) for one in ranks))


if __name__ == "__main__":
    main()
