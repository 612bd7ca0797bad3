"""From Fleet's verdict to a drained node: 20 jobs with a slow rank, a real Fleet, a real Slurm, the real program."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.remediation.live import launch_remediator, run_job, write_policy

from ingero.sim.cluster.slurm import build_local_nodes, run_slurm, why_no_slurm

SAYS = "From Fleet's verdict to a drained node in Slurm"
N_RUNS = 20
LIMIT_S = 60


def run() -> Iterator[str]:
    """Lines as they are known."""
    reason = why_no_slurm()
    if reason:
        yield f"not measured: {reason}"
        return
    delays, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder, run_job() as (agents, pushes):
        (Path(folder) / "s").mkdir()
        with run_slurm(Path(folder) / "s", build_local_nodes()) as slurm:
            for number in range(N_RUNS):
                place = Path(folder) / str(number)
                place.mkdir()
                file = write_policy(place, agents, poll="1s")
                with launch_remediator(file, slurm):
                    delays.append(time_one(slurm, pushes, f"job{number}"))
                states = slurm.states()
                wrong += sum(states[node] != "idle" for node in ("h1", "h3", "h4"))
                slurm.run("scontrol", "update", "nodename=h2", "state=resume")
    yield (
        f"verdict to drained: median {statistics.median(delays):.2f} s, at most {max(delays):.2f} s in"
        f" {len(delays)} of {N_RUNS} runs, of which 1 s is fleet.poll_interval; other nodes drained: {wrong}"
    )
    yield "findings.min_persistence is 0s here; its default adds 30 s"


def time_one(slurm, pushes, cluster):
    """Seconds from the first answer of Fleet that names the node to the first of Slurm that shows it drained."""
    pushes.start(cluster)
    named_s, end_s = None, time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        pushes.push()
        if named_s is None:
            if pushes.find_culprits():
                named_s = time.monotonic()
        elif slurm.states()["h2"].startswith("dr"):
            return time.monotonic() - named_s
    raise TimeoutError(f"{cluster}: not drained within {LIMIT_S} s")
