"""A real process that becomes another program, with the next rank in its environment and a GPU of that number, when it is told to."""

import os
import subprocess
import sys
from contextlib import contextmanager

PROGRAM = """
import os, sys
print(flush=True)
sys.stdin.readline()
os.environ["RANK"] = os.environ["CUDA_VISIBLE_DEVICES"] = str(int(os.environ["RANK"]) + 1)
os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
"""


@contextmanager
def running_rank_0(**variables):
    """It runs and is rank 0; ``variables`` join its environment."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "4", **variables},
    ) as process:
        process.stdout.readline()
        yield process
        process.kill()


def become_next(process):
    """It has called execve and is the next rank."""
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
