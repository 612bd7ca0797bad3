"""``python -m benchmarks [NAME …]``: speed, each figure beside a floor measured in the same run.

A benchmark is a module with ``SAYS`` (one line) and ``run() -> Iterable[str]`` (lines to print as they are known). It
says itself what it could not measure here and why.
"""

import sys
import time

from benchmarks import (
    agent_cpu,
    capture,
    collectives,
    dashboard,
    echo,
    explain,
    failing,
    ingest,
    judge,
    kubernetes_nodes,
    live_page,
    probe_cost,
    push,
    remediation,
    ring,
    story,
    takeover,
    threshold,
    torch_job,
    unwinding,
    workers,
)

BENCHMARKS = (
    push,
    ingest,
    workers,
    takeover,
    collectives,
    threshold,
    judge,
    explain,
    dashboard,
    live_page,
    echo,
    ring,
    probe_cost,
    unwinding,
    agent_cpu,
    capture,
    torch_job,
    failing,
    remediation,
    kubernetes_nodes,
    story,
)
"""Every benchmark, in the order they run."""


def main(names):
    known = {module.__name__.rpartition(".")[2]: module for module in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name, module in known.items():
        if names and name not in names:
            continue
        print(f"== {name}: {module.SAYS}", flush=True)
        began = time.monotonic()
        for line in module.run():
            print(line, flush=True)
        print(f"   ({time.monotonic() - began:.0f} s)\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
