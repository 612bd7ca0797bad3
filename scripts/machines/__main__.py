"""``python -m scripts.machines [MACHINE]``.

Boot machines, run the checks in each, print one line per machine and check.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.machines.catalog import MACHINES, Machine, choose_machines
from scripts.machines.emulator import SUITE, Guest, build_command, fetch_emulator, find_modules
from scripts.machines.fetch import Apt, FetchError
from scripts.machines.image import Image, build_image
from scripts.machines.outcomes import Outcome, read_outcomes
from scripts.machines.table import record


def find_cache() -> Path:
    """The user's cache folder."""
    top = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # noqa: TID251 - no part of the product
    return Path(top) / "ingero/machines"


@dataclass(frozen=True, slots=True)
class Bootable:
    """A machine with all that it needs.

    Attributes:
        machine: What it is.
        image: Its kernel and its files.
    """

    machine: Machine
    image: Image


def prepare(machine: Machine, cache: Path) -> Bootable:
    """Fetch and build what a machine boots.

    Raises:
        FetchError: What it needs could not be fetched.
    """
    apt = Apt(cache, machine.arch, frozenset({machine.suite}))
    apt.update()
    return Bootable(machine, build_image(machine, cache, apt))


def boot(one: Bootable, emulator: Path, checks: list[str]) -> list[Outcome]:
    """Run one machine, and in it the checks of these patterns, or all; the outcomes are printed as they come."""
    machine, start_s = one.machine, time.monotonic()
    command = build_command(emulator, machine, one.image, checks)
    guest = Guest(command, find_modules(emulator), machine.limit_s)
    outcomes = []
    for outcome in read_outcomes(machine.name, guest.iter_lines()):
        print(outcome, flush=True)
        outcomes.append(outcome)
    said = [f"{machine.name}: {time.monotonic() - start_s:.0f} s in all"]
    if guest.was_stopped:
        said.append(f"{machine.name}: stopped after {machine.limit_s:.0f} s")
    if not all(outcome.passed for outcome in outcomes):
        said += [f"{machine.name}: the end of its console:", *(f"  {line}" for line in guest.tail)]
    print("\n".join(said), flush=True)
    return outcomes


def main(arguments: list[str]) -> int:
    """Run the command; its exit status.

    0 when all passed, 1 when one did not, 3 when something could not be fetched.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.machines", description=__doc__)
    known = ", ".join(machine.name for machine in MACHINES)
    parser.add_argument("only", nargs="?", default="", help=f"names or patterns of: {known}")
    parser.add_argument("--checks", nargs="*", default=[], help="patterns of checks: 'filter*' up")
    parser.add_argument(
        "--jobs", type=int, default=1, help="machines that run at a time (4 GiB each)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the outcomes, and make the README's table of them",
    )
    options = parser.parse_args(arguments)
    try:
        machines = choose_machines(options.only)
    except ValueError as error:
        parser.error(str(error))
    cache = find_cache()
    try:
        host = Apt(cache, platform.machine(), frozenset({SUITE}))
        host.update()
        emulator = fetch_emulator(cache, host)
        ready = [prepare(machine, cache) for machine in machines]
    except FetchError as error:
        print(f"machines: cannot fetch {error}", file=sys.stderr)
        return 3
    with ThreadPoolExecutor(max(options.jobs, 1)) as pool:
        run = functools.partial(boot, emulator=emulator, checks=options.checks)
        outcomes = [outcome for some in pool.map(run, ready) for outcome in some]
    if options.record:
        record(outcomes)
    n_failed = sum(not outcome.passed for outcome in outcomes)
    print(f"machines: {len(outcomes) - n_failed} of {len(outcomes)} checks passed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
