"""What an agent that has nothing to do takes of the machine."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.kernel

MOST_FREE_KB = 2048
MOST_CACHED_KB = 1024

IDLE = """
import json, os, sys
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.heap import trim_heap

def read_own():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

with TraceSession(TraceSettings(pids=(os.getpid(),)), []) as session:
    found = []

    def is_over():
        found.append(read_own())
        trim_heap()
        found.append(read_own())
        for name in [name for name in sys.modules if name.startswith("ingero.")]:
            for value in vars(sys.modules[name]).values():
                getattr(value, "cache_clear", int)()
        trim_heap()
        found.append(read_own())
        return True

    session.run(is_over)
print(json.dumps(found))
"""


def test_what_only_loading_the_probes_needed_is_given_back():
    done = subprocess.run(
        [sys.executable, "-c", IDLE], capture_output=True, text=True, check=True
    ).stdout
    idle_kb, least_kb, uncached_kb = json.loads(done)
    assert idle_kb - least_kb < MOST_FREE_KB
    assert least_kb - uncached_kb < MOST_CACHED_KB
