"""``python -m tests.chaos [--faults N] [--seconds S] [--seed N] [--history FILE]``: prints a tally; 1 on a violation."""

import argparse
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.checker import check, tally
from tests.chaos.faults import Faults
from tests.chaos.history import History, Slowed, Verdict, write_history
from tests.chaos.job import N_RANKS
from tests.chaos.site import Site
from tests.chaos.workload import Workload

WARM_S = 12.0
"""Before the first fault: the job is known, thresholds are drawn."""
SLOW_S, REST_S = 40.0, 20.0
SETTLE_S = 90.0
"""Longest wait for what is queued when the faults are over."""


def main():
    """Run once."""
    options = _parse()
    history = History(n_nodes=N_RANKS)
    print(f"chaos: seed {options.seed}, at most {options.faults} faults in {options.seconds:.0f} s")
    with tempfile.TemporaryDirectory(prefix="ingero-chaos-") as folder:
        try:
            torment(Path(folder), history, options)
        finally:
            if options.history:
                write_history(history, options.history)
                _keep_logs(Path(folder), options.history)
    violations = check(history)
    for line in tally(history):
        print(line)
    for violation in violations:
        print(f"VIOLATION {violation.kind}: {violation.detail}")
    print(f"{len(violations)} violations")
    return 1 if violations else 0


def torment(folder, history, options):
    """Start a site, run the replay, do the faults, and fill the history."""
    choose = random.Random(options.seed)
    with ExitStack() as stack:
        site = Site(folder, stack)
        print(f"site: {len(site.fleets)} Fleets as {site.cluster.isolation}, NATS, Echo")
        site.begin()
        began_s = time.monotonic()
        wall_s = time.time() - time.monotonic() + began_s
        workload = Workload(site, history, options.seed, began_s)
        stack.callback(workload.stop)
        workload.begin()
        time.sleep(WARM_S)
        history.start_s = time.monotonic() - began_s
        is_over = threading.Event()
        slowing = threading.Thread(
            target=_slow_ranks, args=(workload.job, history, began_s, is_over), daemon=True
        )
        slowing.start()
        faults = Faults(site, workload, choose, began_s)
        if faults.left_out:
            print(f"left out, for they need root: {', '.join(faults.left_out)}")
        until_s = time.monotonic() + options.seconds
        while len(history.faults) < options.faults and time.monotonic() < until_s:
            time.sleep(choose.uniform(0.2, 2.5))
            fault = faults.do_one()
            history.faults.append(fault)
            if options.verbose:
                print(
                    f"{fault.start_s:7.1f} {fault.end_s - fault.start_s:5.1f} s {fault.kind}: {fault.target}"
                )
        is_over.set()
        slowing.join()
        history.end_s = time.monotonic() - began_s
        workload.end()
        _settle(site, workload)
        workload.stop()
        for part in site.parts:
            part.end()
        _read(site, history, wall_s)


def _slow_ranks(job, history, began_s, is_over):
    """One rank after the other is slow for a while."""
    rank = 0
    while not is_over.wait(2.0):
        job.slow = rank
        start_s = time.monotonic() - began_s
        is_over.wait(SLOW_S)
        job.slow = None
        history.slowed.append(Slowed(rank, start_s, time.monotonic() - began_s))
        rank = (rank + 3) % N_RANKS
        is_over.wait(REST_S)


def _settle(site, workload):
    """Wait until nothing is on its way any more: at agents, and in queues of Fleets."""
    until_s = time.monotonic() + SETTLE_S
    quiet_s = time.monotonic()
    while time.monotonic() < until_s and time.monotonic() - quiet_s < 6.0:
        if not workload.is_settled() or site.count_queued():
            quiet_s = time.monotonic()
        time.sleep(0.2)


def _read(site, history, wall_s):
    """What Echo has in the end."""
    collectives, verdicts, logs = site.read_echo()
    for rank, seq in collectives:
        history.stored.setdefault(f"rank {rank}", []).append(seq)
    history.stored["echo"] = [int(body) for (body,) in logs]
    history.verdicts = [
        Verdict(rank, kind, before or "", ns / 1e9 - wall_s)
        for rank, kind, before, ns in verdicts
        if rank is not None
    ]


def _keep_logs(folder, history):
    for log in folder.glob("*.log"):
        (history.parent / f"{history.stem}-{log.name}").write_bytes(log.read_bytes())


def _parse():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--history", type=Path)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
