"""``python -m tests.fuzz``: mutated bodies for every decoder, each in a process of its own. See CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import run
from tests.fuzz.mutate import MAX_BYTES
from tests.fuzz.targets import DATA, list_targets

KEPT = DATA / "fuzz"
MEMORY_BYTES = 4 << 30
_SILENT_S = 30.0
"""A process that takes no further body for this long is stuck where no signal reaches it."""


def main() -> int:
    """Exit status 1 when a decoder broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="decoders; all without any")
    parser.add_argument("--bodies", type=int, default=10_000, help="how many for each (10000)")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 2**31,
        help="of the choices; default: another each time",
    )
    parser.add_argument("--list", action="store_true", help="name the decoders")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    targets = list_targets()
    unknown = sorted(set(args.targets) - set(targets))
    if unknown:
        parser.error(f"no decoder {', '.join(unknown)}; there are {', '.join(targets)}")
    if args.list:
        print(*targets, sep="\n")
        return 0
    if args.alone:
        return _run_alone(args.targets[0], args.bodies, args.seed, Path(args.alone))
    print(
        f"{'decoder':24}{'bodies':>10}{'taken':>10}{'refused':>10}{'kinds':>7}{'grown':>9}{'seconds':>9}",
        flush=True,
    )
    n_broken = sum(not _watch(name, args.bodies, args.seed) for name in args.targets or targets)
    print(
        f"seed {args.seed}; {n_broken} of {len(args.targets or targets)} decoders broke", flush=True
    )
    return int(n_broken > 0)


def _watch(name: str, n_bodies: int, seed: int) -> bool:
    """Run one in a process of its own; whether it held."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(MAX_BYTES + 16)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            name,
            "--bodies",
            str(n_bodies),
            "--seed",
            str(seed),
            "--alone",
            shared.name,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            last, since = b"", time.monotonic()
            while process.poll() is None:
                time.sleep(0.05)
                now = Path(shared.name).read_bytes()[:8]
                if now != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > _SILENT_S:
                    process.kill()
            said = process.stdout.read() if process.stdout else ""
        note = Path(shared.name).read_bytes()
    if process.returncode:
        size = int.from_bytes(note[8:16], "little")
        _keep(name, note[16 : 16 + size], f"the process ended with {process.returncode}")
        return False
    outcome = json.loads(said)
    seconds = time.monotonic() - began
    if outcome["broken"]:
        _keep(name, bytes.fromhex(outcome["broken"][0]), outcome["broken"][1])
        return False
    print(
        f"{name:24}{n_bodies:10}{outcome['taken']:10}{outcome['refused']:10}{outcome['kinds']:7}"
        f"{outcome['grown'] >> 20:6} MiB{seconds:9.1f}", flush=True,
    )  # fmt: skip
    return True


def _keep(name: str, body: bytes, why: str) -> None:
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / hashlib.sha256(body).hexdigest()[:16]
    file.write_bytes(body)
    print(f"{name}: BROKEN by {file}\n{why}", flush=True)


def _run_alone(name: str, n_bodies: int, seed: int, shared: Path) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        n_noted = 0

        def note(body: bytes) -> None:
            nonlocal n_noted
            n_noted += 1
            memory[:16] = n_noted.to_bytes(8, "little") + len(body).to_bytes(8, "little")
            memory[16 : 16 + len(body)] = body

        outcome = run(list_targets()[name], n_bodies, seed, note)
    broken = outcome.broken and (outcome.broken[0].hex(), outcome.broken[1])
    print(json.dumps({
        "taken": outcome.n_taken, "refused": outcome.n_refused, "kinds": outcome.n_kinds,
        "grown": outcome.grown_bytes, "broken": broken,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
