"""Leaves every function of Gloo that may throw by an exception, in a real PyTorch; prints what was caught, by function.

The other rank of each group is made, meets this one, and is gone before anything is asked of it.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

SHORT = timedelta(seconds=2)


def run_peer(port):
    """The rank that goes away."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
    group = dist.ProcessGroupGloo(dist.PrefixStore("a/", store), 1, 2, timedelta(seconds=60))
    sys.stdin.read(1)
    assert group.rank() == 1
    os._exit(0)


def main():
    """The rank that stays."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    pid, gate = start_peer(store.port)
    group = dist.ProcessGroupGloo(dist.PrefixStore("a/", store), 0, 2, timedelta(seconds=60))
    one, two = torch.ones(4), [torch.ones(4), torch.ones(4)]
    sent = group.send([torch.ones(1 << 24)], 1, 0)  # more than a socket takes
    received = group.recv([one.clone()], 1, 1)
    os.write(gate, b"x")
    os.waitpid(pid, 0)
    calls = {
        "barrier": group.barrier,  # first: it would wait for those before it, and fail in that
        "allreduce": lambda: group.allreduce(one),
        "allgather": lambda: group.allgather([two], [one]),
        "alltoall": lambda: group.alltoall_base(one.clone(), one, [], []),
        "alltoallv": lambda: group.alltoall_base(one.clone(), one, [1, 3], [1, 3]),
        "broadcast": lambda: group.broadcast(one, 0),
        "gather": lambda: group.gather(two, one, 0),
        "reduce": lambda: group.reduce(one, 0),
        "scatter": lambda: group.scatter(one, two, 0),
        "send": lambda: sent,
        "recv": lambda: received,
        "group": lambda: dist.ProcessGroupGloo(dist.PrefixStore("b/", store), 0, 2, SHORT),
    }
    caught = {}
    for name, call in calls.items():
        try:
            work = call()
            if hasattr(work, "wait"):
                work.wait()
        except RuntimeError as error:
            caught[name] = type(error).__name__
    print(json.dumps({"caught": caught, "sum": float(one.sum())}), flush=True)
    os._exit(0)


def start_peer(port):
    """The other rank, before this process has any thread of Gloo; a pipe lets it go on."""
    read_end, gate = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(read_end, 0)
        os.execv(sys.executable, [sys.executable, __file__, str(port)])
    return pid, gate


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        run_peer(int(sys.argv[1]))
    main()
