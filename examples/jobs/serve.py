"""Tensor-parallel inference on the CPU (Gloo): requests of a prompt (prefill) and then a token at a time (decode).

Each rank has some heads and a slice of every feed-forward part, with the cache of its heads; the ranks add up twice a
layer, as servers of large models do. Between requests all of them wait for the same time.

Run it by `torchrun --nproc-per-node 4 examples/jobs/serve.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/serve.py --fault cpu-quota:2:50%`.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """One rank's part of a layer: two collectives."""

    def __init__(self, width: int, n_ranks: int) -> None:
        super().__init__()
        part = width // n_ranks
        self.query, self.key, self.value = (nn.Linear(width, part) for _ in range(3))
        self.out = nn.Linear(part, width)
        self.up = nn.Linear(width, 4 * part)
        self.down = nn.Linear(4 * part, width)

    def forward(self, inputs: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """Tokens of all sequences, shape (sequences, tokens, width); appends to the cache of keys and values."""
        new = [self.key(inputs), self.value(inputs)]
        cache[:] = (
            [torch.cat(pair, dim=1) for pair in zip(cache, new, strict=True)] if cache else new
        )
        mixed = functional.scaled_dot_product_attention(
            self.query(inputs), *cache, is_causal=inputs.shape[1] > 1
        )
        attended = self.out(mixed)
        dist.all_reduce(attended)
        hidden = inputs + attended
        changed = self.down(functional.gelu(self.up(hidden)))
        dist.all_reduce(changed)
        return hidden + changed


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=0, help="0 serves until it is stopped")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt")
    parser.add_argument("--sequences", type=int, default=16, help="answered at once")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument(
        "--idle", type=float, default=0.02, help="longest pause between requests, in seconds"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = nn.ModuleList(
        Layer(options.width, dist.get_world_size()) for _ in range(options.depth)
    )
    shared = torch.Generator().manual_seed(1)  # the same requests on every rank
    served = 0
    with torch.inference_mode():
        while not options.requests or served < options.requests:
            time.sleep(options.idle * torch.rand(1, generator=shared).item())
            size = (options.sequences, options.prompt, options.width)
            tokens = torch.randn(size, generator=shared)
            caches: list[list[torch.Tensor]] = [[] for _ in layers]
            for _ in range(1 + options.tokens):  # prefill first
                for layer, cache in zip(layers, caches, strict=True):
                    tokens = layer(tokens, cache)
                tokens = functional.normalize(tokens[:, -1:])
            served += 1
            if rank == 0 and served % 10 == 0:
                print(f"{served} requests", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
