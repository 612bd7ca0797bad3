"""Data-parallel training with DDP on the CPU (Gloo) whose data does not fit into memory: every row is read from a disk.

A worker process of each rank reads ahead; with `--workers 0` the training process reads. Run it by
`torchrun --nproc-per-node 4 examples/jobs/ddp_files.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/ddp_files.py --fault disk:2:2MB/s`.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from inside import Faults
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Rows of files of one folder.

    Args:
        folder: Where they are; made when they are missing.
        width: Numbers in a row.
        faults: What is done to those who read.
    """

    rows = 2048

    def __init__(self, folder: Path, width: int, faults: Faults) -> None:
        self._width, self._faults = width, faults
        self._files = []
        for number in range(8):
            path = folder / f"{number}.bin"
            if not path.exists():
                data = np.random.default_rng(number).normal(size=(self.rows, width))
                path.write_bytes(data.astype(np.float32).tobytes())
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # only pages that are on the disk can be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            self._files.append(file)

    def __len__(self) -> int:
        """Rows of all files."""
        return self.rows * len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """A row and its label."""
        self._faults.load()
        number, row = divmod(index, self.rows)
        file, n_bytes = self._files[number], 4 * self._width
        data = os.pread(file, n_bytes, row * n_bytes)
        # As with data that does not fit into memory: nothing is found there when it is wanted again.
        os.posix_fadvise(file, row * n_bytes, n_bytes, os.POSIX_FADV_DONTNEED)
        return torch.frombuffer(bytearray(data), dtype=torch.float32), index % 10


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1, help="processes that read ahead")
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    width = options.width
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory(prefix=f"samples-{rank}-") as folder:
        faults = Faults()
        samples = Samples(Path(folder), width, faults)
        epoch = 0
        while not options.epochs or epoch < options.epochs:
            loader = DataLoader(samples, options.batch, shuffle=True, num_workers=options.workers)
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                faults.step()
            if rank == 0:
                print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            epoch += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
