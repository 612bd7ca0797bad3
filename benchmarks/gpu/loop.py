"""A launch-bound loop or a training step, alone or under PyTorch's profiler; run by an interpreter with torch.

``loop.py KIND DEVICE N [--profiler]`` prints one JSON object: how long it took, and each step or call.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

import torch

_WIDTH = 1024
_BATCH = 64
_WARM_UP = 10
_LAUNCHES_A_ROUND = 1000


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("calls", "steps"))
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("n", type=int)
    parser.add_argument("--profiler", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(1)
    turn = (_calls if asked.kind == "calls" else _steps)(asked.device)
    for _ in range(_WARM_UP):
        turn()
    times_ns = []
    with _open_profiler(asked.device) if asked.profiler else contextlib.nullcontext():
        for _ in range(asked.n):
            began_ns = time.perf_counter_ns()
            turn()
            times_ns.append(time.perf_counter_ns() - began_ns)
    per_turn = _LAUNCHES_A_ROUND if asked.kind == "calls" else 1
    said = {
        "kind": asked.kind,
        "n": asked.n,
        "median_ns": statistics.median(times_ns) / per_turn,
        "mean_ns": statistics.fmean(times_ns) / per_turn,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
    }
    # `ingero trace` has standard output for itself.
    print(json.dumps(said), file=sys.stderr, flush=True)


def _calls(device):
    """A round of launches of the smallest kernel there is."""
    x = torch.ones(1, device=device)

    def turn():
        for _ in range(_LAUNCHES_A_ROUND):
            x.add_(1.0)
        _wait(device)

    return turn


def _steps(device):
    """Forward, backward and update of four layers."""
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.ReLU()))).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(_BATCH, _WIDTH, device=device)

    def turn():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        _wait(device)

    return turn


def _wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def _open_profiler(device):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


if __name__ == "__main__":
    main()
