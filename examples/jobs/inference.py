"""Inference on the CPU (Gloo): each rank answers its part of a batch, and all gather the answers.

Run it by `torchrun --nproc-per-node 4 examples/jobs/inference.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/inference.py --fault cpu-quota:2:50%`.
"""

import argparse
import ctypes

import torch
import torch.distributed as dist
from torch import nn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h


def keep_memory() -> None:
    """Let the process keep what it frees.

    Else a rank whose heap happens to end with a batch's memory gives it back to the kernel after each batch and faults
    it in again for the next: a fifth more processor time than its peers take, for minutes.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=0, help="0 goes on until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    width = options.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    done = 0
    with torch.inference_mode():
        while not options.batches or done < options.batches:
            answers = model(torch.randn(options.batch // n_ranks, width))
            gathered = [torch.empty_like(answers) for _ in range(n_ranks)]
            dist.all_gather(gathered, answers)
            done += 1
            if rank == 0 and done % 100 == 0:
                print(f"{done} batches", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
