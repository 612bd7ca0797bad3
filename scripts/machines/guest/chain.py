"""Runs a program without frame pointers, whose return addresses arm64 signs, for the stacks that a tracer finds.

The program is ``tests/data/stacks/chain.c``, compiled for the guest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Final

PROGRAM: Final = "/checks/chain"
# What each path of the program goes through, innermost first; where the C library is between, that has no names.
PATHS: Final = {
    "plain": ["leaf", "saves_registers", "main"],
    "alloca": ["leaf", "saves_registers", "allocates", "main"],
    "alloca, more": ["leaf", "saves_registers", "allocates", "main"],
    "realigned": ["leaf", "saves_registers", "allocates", "realigns_more", "realigns", "main"],
    "left": ["leaf", "saves_registers", "left", "main"],
    "right": ["leaf", "saves_registers", "right", "main"],
    "deep": ["leaf", "saves_registers", *["recurses"] * 41, "main"],
    "through the C library": ["leaf", "saves_registers", "compare", "sorts", "main"],
    "signal": ["leaf", "saves_registers", "on_signal", "is_interrupted", "main"],
    "thread": ["leaf", "saves_registers", "allocates", "in_thread"],
    "driver": ["allocates_memory", "main"],
    "entry": ["cudaEventRecord", "records_event", "main"],
}
OPERATIONS: Final = frozenset({"cudaStreamSync", "cudaMalloc", "cudaEventRecord"})
_N_ROUNDS: Final = 6
_PAUSE_S: Final = 2  # the agent learns meanwhile how to walk the stacks that it has met


def drive(program: str) -> None:
    """Let the program make its calls, round after round."""
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(_N_ROUNDS):
            time.sleep(_PAUSE_S)
            print(file=process.stdin, flush=True)
            while process.stdout.readline().strip():
                pass
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    drive(sys.argv[1])
