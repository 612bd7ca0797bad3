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
_SILENT_S = 300.0
"""A process that takes no further body for this long is stuck where no signal reaches it; to start takes long under load."""


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
        status, said = follow(command, Path(shared.name))
        note = Path(shared.name).read_bytes()
    if status:
        size = int.from_bytes(note[8:16], "little")
        _keep(
            name,
            note[16 : 16 + size],
            f"the process ended with {status}; -9 where it took no further body for {_SILENT_S:.0f} s",
        )
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


def follow(command: list[str], shared: Path, silent_s: float = _SILENT_S) -> tuple[int, str]:
    """Run a process until it ends, or for as long as it goes on to other bodies.

    Args:
        command: It writes how many bodies it began into the first 8 bytes of `shared`.
        shared: A file.
        silent_s: It is killed when that number stays the same for so long.

    Returns:
        Its exit status, negative for a signal, and its output of any length.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        last, since = b"", time.monotonic()
        while True:
            try:
                # This also empties the pipe, which holds less than an outcome with a body in it.
                said, _ = process.communicate(timeout=0.05)
            except subprocess.TimeoutExpired:
                now = shared.read_bytes()[:8]
                if now != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > silent_s:
                    process.kill()
            else:
                return process.returncode, said


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
