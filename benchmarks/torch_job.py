"""Step time of a real PyTorch job under an agent that pushes to a Fleet, over the same job bare, in turns.

Two ranks of DDP over Gloo on this machine's processors, none of which is left over: what the agent and Fleet take, the
job loses. The job says itself what it computed, to the last bit.

Environment: ``INGERO_BENCH_PAIRS`` (10; a pair takes about 50 s), ``INGERO_TORCH_PYTHON`` (an interpreter with torch).
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
from pathlib import Path

from ingero.config.torch import find_torch_python
from ingero.testing.fleet import build_fleet_config, run_fleet

SAYS = "step time of a PyTorch job with the agent, over the same job bare; what it computes is the same"
BAR = 1.01
N_RANKS, N_STEPS, LIMIT_S = 2, 1500, 300
ATTACH_S = 4.0
_JOB = """
import hashlib, json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
n_steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = []
for _ in range(4):
    layers += [nn.Linear(256, 256), nn.GELU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 10)), bucket_cap_mb=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(dist.get_rank())
took, began = [], time.perf_counter()
for step in range(n_steps):
    inputs = torch.randn(256, 256, generator=data)
    labels = torch.randint(10, (256,), generator=data)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ended = time.perf_counter()
    took.append(ended - began)
    began = ended
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
    digest.update(parameter.grad.numpy().tobytes())
settled = took[n_steps // 5 :]
if dist.get_rank() == 0:
    print(json.dumps({"mean_ms": 1e3 * sum(settled) / len(settled), "loss": loss.item(), "bits": digest.hexdigest()}))
dist.barrier()
dist.destroy_process_group()
"""


def run():
    python = find_torch_python()
    if os.geteuid():
        yield "   not measured: probes need root"
        return
    if python is None:
        yield "   not measured: no Python here has PyTorch; INGERO_TORCH_PYTHON names one"
        return
    n_pairs = int(os.environ.get("INGERO_BENCH_PAIRS", "10"))
    pairs, agents = [], []
    with tempfile.TemporaryDirectory() as folder, run_fleet(build_fleet_config(nccl={})) as fleet:
        script = Path(folder) / "job.py"
        script.write_text(_JOB)
        for number in range(n_pairs):
            found = {}
            for is_watched in (False, True)[:: 1 if number % 2 else -1]:
                agent = watching(fleet, Path(folder), agents) if is_watched else nullcontext()
                with agent:
                    found[is_watched] = train(python, script)
            pairs.append(found)
            yield f"   pair {number + 1}: {describe(found)}; agent {agents[-1]}"
    ratios = [found[True]["mean_ms"] / found[False]["mean_ms"] for found in pairs]
    results = {(one["bits"], one["loss"], one["exit"]) for found in pairs for one in found.values()}
    same = "the same in all runs" if len(results) == 1 else f"{len(results)} DIFFERENT RESULTS"
    yield (
        f"   × {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f} over {n_pairs} pairs; bar {BAR}); "
        f"weights, gradients, loss and exit status: {same}"
    )
    bare = [found[False]["mean_ms"] for found in pairs]
    yield f"   bare runs of one job differ by themselves: {min(bare):.3f} to {max(bare):.3f} ms a step"


def describe(found):
    return (
        f"{found[False]['mean_ms']:.3f} ms a step bare, {found[True]['mean_ms']:.3f} with the agent"
    )


def train(python, script):
    """What rank 0 says of one run."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(N_RANKS), str(script), str(N_STEPS)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environ
    )
    if done.returncode:
        raise RuntimeError(done.stderr[:6000])
    return json.loads(done.stdout.splitlines()[-1]) | {"exit": done.returncode}


@contextmanager
def watching(fleet, folder, agents):
    """An agent with default options that pushes to a Fleet; what it took is added to the list."""
    command = [sys.executable, "-m", "ingero", "fleet-push", "--json", "--fleet-insecure"]
    command += ["--fleet-endpoint", fleet.url("receivers.otlp http"), "--fleet-cluster-id", "c"]
    command += ["--fleet-push-interval", "5s", "--fleet-spill-dir", str(folder / "spill")]
    command += ["--fleet-persist-path", str(folder / "baseline.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        time.sleep(ATTACH_S)
        began_s, began_cpu_s = time.monotonic(), read_cpu_s(agent.pid)
        try:
            yield
            share = (read_cpu_s(agent.pid) - began_cpu_s) / (time.monotonic() - began_s)
        finally:
            agent.send_signal(signal.SIGINT)
            out = agent.communicate()[0]
        taken = json.loads(out.splitlines()[-1])["collectives"]["taken"]
        agents.append(f"{100 * share:.1f} % of a core, {taken} collectives taken by Fleet")


def read_cpu_s(pid):
    """User and system time of all threads of a process (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
