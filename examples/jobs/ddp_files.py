"""Data-parallel training with DDP on the CPU (Gloo) whose data comes from files, read by a worker process of each rank.

Run it by `torchrun --nproc-per-node 4 examples/jobs/ddp_files.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/ddp_files.py --fault cpu-quota:2:50%`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Rows of files of one folder, each file read when one of its rows is wanted.

    Args:
        folder: Where they are; made when they are missing.
        width: Numbers in a row.
    """

    rows = 512

    def __init__(self, folder: Path, width: int) -> None:
        self._paths = [folder / f"{number}.npy" for number in range(8)]
        for number, path in enumerate(self._paths):
            if not path.exists():
                data = np.random.default_rng(number).normal(size=(self.rows, width))
                np.save(path, data.astype(np.float32))

    def __len__(self) -> int:
        """Rows of all files."""
        return self.rows * len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """A row and its label."""
        number, row = divmod(index, self.rows)
        data = np.load(self._paths[number], mmap_mode="r")
        return torch.from_numpy(data[row].copy()), index % 10


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    width = options.width
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory(prefix=f"samples-{rank}-") as folder:
        samples = Samples(Path(folder), width)
        epoch = 0
        while not options.epochs or epoch < options.epochs:
            for inputs, labels in DataLoader(samples, options.batch, shuffle=True, num_workers=1):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if rank == 0:
                print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            epoch += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
