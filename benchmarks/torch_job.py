"""Step time of a real PyTorch job under an agent that pushes to a Fleet, over the same job bare, in turns.

Two ranks of DDP over Gloo on this machine's processors, none of which is left over: what the agent and Fleet take, the
job loses. Agents come and go while one job runs, since two jobs differ by more than an agent takes. What it computes,
to the last bit, is compared over jobs of their own.

Environment: ``INGERO_BENCH_PAIRS`` (10; a pair takes about 30 s), ``INGERO_TORCH_PYTHON`` (an interpreter with torch).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ingero.config.torch import find_torch_python
from ingero.testing.fleet import build_fleet_config, run_fleet

SAYS = "step time of a PyTorch job with the agent, over the same job bare; what it computes is the same"
BAR = 1.01
N_RANKS, N_STEPS, NO_END, LIMIT_S = 2, 400, 1_000_000_000, 300
START_S, ATTACH_S, WINDOW_S, FLUSH_S = 15.0, 4.0, 10.0, 2.0
_JOB = """
import hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
n_steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
ends = open(f"{sys.argv[2]}.{dist.get_rank()}", "w", 1 << 10)
layers = []
for _ in range(4):
    layers += [nn.Linear(256, 256), nn.GELU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 10)), bucket_cap_mb=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(n_steps):
    inputs = torch.randn(256, 256, generator=data)
    labels = torch.randint(10, (256,), generator=data)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ends.write(f"{time.monotonic()}\\n")
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
    digest.update(parameter.grad.numpy().tobytes())
if dist.get_rank() == 0:
    print(json.dumps({"loss": loss.item(), "bits": digest.hexdigest()}))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # some of PyTorch's threads outlive the group, and abort one bare job in twenty while the interpreter ends
"""


@dataclass
class Window:
    """Ten seconds of the job, with an agent or without one."""

    is_watched: bool
    began_s: float
    ended_s: float
    agent_share: float
    fleet_share: float
    step_ms: float = 0.0


def run():
    python = find_torch_python()
    if os.geteuid():
        yield "   not measured: probes need root"
        return
    if python is None:
        yield "   not measured: no Python here has PyTorch; INGERO_TORCH_PYTHON names one"
        return
    n_pairs = int(os.environ.get("INGERO_BENCH_PAIRS", "10"))
    with tempfile.TemporaryDirectory() as folder, run_fleet(build_fleet_config(nccl={})) as fleet:
        job = Path(folder) / "job.py"
        job.write_text(_JOB)
        windows = measure(fleet, python, job, n_pairs)
        yield from describe_pairs(windows)
        results = set()
        for is_watched in (False, True, True, False):
            with watching(fleet, job.parent) if is_watched else nullcontext():
                results.add(train(python, job))
    same = "the same" if len(results) == 1 else f"{len(results)} DIFFERENT RESULTS"
    yield f"   weights, gradients, loss and exit status of two jobs with the agent and two bare: {same}"


def measure(fleet, python, job, n_pairs):
    """The windows of one job, bare and watched in turns: the second of a pair is the kind of the next pair's first."""
    kinds = [
        kind for number in range(n_pairs) for kind in (False, True)[:: 1 if number % 2 else -1]
    ]
    with running(python, job):
        windows = [watch_job(fleet, job, is_watched) for is_watched in kinds]
        time.sleep(FLUSH_S)
    lines = Path(f"{job.with_suffix('.ends')}.0").read_text().splitlines()
    moments = [float(line) for line in lines[:-1]]
    for window in windows:
        inside = [each for each in moments if window.began_s <= each <= window.ended_s]
        window.step_ms = 1e3 * (inside[-1] - inside[0]) / (len(inside) - 1)
    return windows


@contextmanager
def running(python, job):
    command = build_command(python, job, NO_END)
    with (
        job.with_suffix(".err").open("w+") as errors,
        subprocess.Popen(command, stderr=errors, env=build_environment()) as launcher,
    ):
        try:
            time.sleep(START_S)
            yield
            if launcher.poll() is not None:
                errors.seek(0)
                raise RuntimeError(f"the job ended by itself: {errors.read()[-6000:]}")
        finally:
            launcher.terminate()


def watch_job(fleet, job, is_watched):
    with watching(fleet, job.parent) if is_watched else nullcontext() as agent:
        if agent is None:
            time.sleep(ATTACH_S)
        pids = [fleet.process.pid, *([agent.pid] if agent else [])]
        began_s, before = time.monotonic(), [read_cpu_s(pid) for pid in pids]
        time.sleep(WINDOW_S)
        ended_s, after = time.monotonic(), [read_cpu_s(pid) for pid in pids]
    taken = [(now - then) / (ended_s - began_s) for now, then in zip(after, before, strict=True)]
    return Window(is_watched, began_s, ended_s, sum(taken[1:]), taken[0])


def describe_pairs(windows):
    bare = [window for window in windows if not window.is_watched]
    watched = [window for window in windows if window.is_watched]
    ratios = [one.step_ms / other.step_ms for one, other in zip(watched, bare, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    for one, other in zip(watched, bare, strict=True):
        yield f"   {other.step_ms:.3f} ms a step bare, {one.step_ms:.3f} with the agent"
    yield (
        f"   × {statistics.median(ratios):.4f} (median; mean {statistics.mean(ratios):.4f}, standard error {error:.4f};"
        f" {min(ratios):.4f} to {max(ratios):.4f} over {len(ratios)} pairs; bar {BAR})"
    )
    agent = statistics.mean(window.agent_share for window in watched)
    fleet = statistics.mean(window.fleet_share for window in watched)
    cores = os.cpu_count()
    yield (
        f"   the agent took {100 * agent:.2f} % of a core and Fleet {100 * fleet:.2f} %, together"
        f" {100 * (agent + fleet) / cores:.2f} % of the {cores} cores that the job filled"
    )


def build_command(python, job, n_steps):
    ranks = ["--standalone", "--nproc-per-node", str(N_RANKS)]
    ends = job.with_suffix(".ends")
    return [str(python), "-m", "torch.distributed.run", *ranks, str(job), str(n_steps), str(ends)]


def build_environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def train(python, job):
    """What rank 0 of a job of its own says that it computed."""
    done = subprocess.run(
        build_command(python, job, N_STEPS),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=build_environment(),
    )
    if done.returncode:
        raise RuntimeError(done.stderr[:6000])
    found = json.loads(done.stdout.splitlines()[-1])
    return found["bits"], found["loss"], done.returncode


@contextmanager
def watching(fleet, folder):
    """An agent with default options that pushes to a Fleet."""
    command = [sys.executable, "-m", "ingero", "fleet-push", "--json", "--fleet-insecure"]
    command += ["--fleet-endpoint", fleet.url("receivers.otlp http"), "--fleet-cluster-id", "c"]
    command += ["--fleet-push-interval", "5s", "--fleet-spill-dir", str(folder / "spill")]
    command += ["--fleet-persist-path", str(folder / "baseline.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        time.sleep(ATTACH_S)
        try:
            yield agent
        finally:
            agent.send_signal(signal.SIGINT)
            out = agent.communicate()[0]
        if not json.loads(out.splitlines()[-1])["collectives"]["taken"]:
            raise RuntimeError("Fleet took no collective of the job: nothing was watched")


def read_cpu_s(pid):
    """User and system time of all threads of a process (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
