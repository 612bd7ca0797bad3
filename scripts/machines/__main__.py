"""``python -m scripts.machines [MACHINE]``: boot machines, run the checks in each, print one line per machine and check."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from scripts.machines.catalog import MACHINES, Machine, choose_machines
from scripts.machines.emulator import SUITE, Guest, build_command, fetch_emulator, find_modules
from scripts.machines.fetch import Apt, FetchError
from scripts.machines.image import build_image
from scripts.machines.outcomes import Outcome, read_outcomes


def find_cache() -> Path:
    """The user's cache folder."""
    top = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # noqa: TID251 - no part of the product
    return Path(top) / "ingero/machines"


def boot(machine: Machine, cache: Path, emulator: Path, checks: list[str]) -> list[Outcome]:
    """Run one machine, and in it the checks of these patterns, or all; the outcomes are printed as they come.

    Raises:
        FetchError: What it needs could not be fetched.
    """
    apt = Apt(cache, machine.arch, frozenset({machine.suite}))
    apt.update()
    image = build_image(machine, cache, apt)
    command = build_command(emulator, machine, image, checks)
    guest = Guest(command, find_modules(emulator), machine.limit_s)
    outcomes = []
    for outcome in read_outcomes(machine.name, guest.iter_lines()):
        print(outcome, flush=True)
        outcomes.append(outcome)
    if guest.was_stopped:
        print(f"{machine.name}: stopped after {machine.limit_s:.0f} s", flush=True)
    if not all(outcome.passed for outcome in outcomes):
        print(f"{machine.name}: the end of its console:", *guest.tail, sep="\n  ", flush=True)
    return outcomes


def main(arguments: list[str]) -> int:
    """Run the command; its exit status: 0 when all passed, 1 when one did not, 3 when something could not be fetched."""
    parser = argparse.ArgumentParser(prog="python -m scripts.machines", description=__doc__)
    known = ", ".join(machine.name for machine in MACHINES)
    parser.add_argument("only", nargs="?", default="", help=f"names or patterns of: {known}")
    parser.add_argument("--checks", nargs="*", default=[], help="patterns of checks: 'filter*' up")
    options = parser.parse_args(arguments)
    try:
        machines = choose_machines(options.only)
    except ValueError as error:
        parser.error(str(error))
    cache = find_cache()
    outcomes = []
    try:
        host = Apt(cache, platform.machine(), frozenset({SUITE}))
        host.update()
        emulator = fetch_emulator(cache, host)
        for machine in machines:
            start_s = time.monotonic()
            outcomes += boot(machine, cache, emulator, options.checks)
            print(f"{machine.name}: {time.monotonic() - start_s:.0f} s in all", flush=True)
    except FetchError as error:
        print(f"machines: cannot fetch {error}", file=sys.stderr)
        return 3
    n_failed = sum(not outcome.passed for outcome in outcomes)
    print(f"machines: {len(outcomes) - n_failed} of {len(outcomes)} checks passed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
