"""``python -m scripts.evidence [--dry-run]``.

Run each part on this machine's NVIDIA device, print one line for each, and keep what was seen in files. A part that
held on this commit is not run again, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

from scripts.evidence.parts import PARTS
from scripts.evidence.running import ROOT, find_commit, has_passed, keep, run_part

from ingero.agent.capture.gpu.driver import has_driver
from ingero.config.torch import find_torch_python

_LIMIT_S: Final = 480.0
_FOLDER: Final = ROOT / "docs/evidence/gpu"


def main(arguments: list[str]) -> int:
    """Run the command; its exit status.

    0 when every part holds, 1 when one does not or was not reached, 3 when this machine cannot run them.
    """
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m scripts.evidence", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--dry-run", action="store_true", help="show that each part starts; no device is needed"
    )
    parser.add_argument("--again", action="store_true", help="run also what held before")
    parser.add_argument("--commit", help="of this tree, where it has no .git")
    parser.add_argument("--out", type=Path, default=_FOLDER, help="where files are kept")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if os.geteuid():
        print("probes need root: sudo make evidence-gpu", file=sys.stderr)
        return 3
    if not asked.dry_run and not has_driver():
        print(
            "no NVIDIA device answers here; `make evidence-gpu DRY_RUN=1` shows that every part starts",
            file=sys.stderr,
        )
        return 3
    chosen = [part for part in PARTS if not asked.parts or part.name in asked.parts]
    commit, python = asked.commit or find_commit(), find_torch_python()
    end_s = time.monotonic() + _LIMIT_S
    n_failed = 0
    for part in chosen:
        if not asked.dry_run and not asked.again and has_passed(part, asked.out, commit):
            print(f"ok   {part.name:<20} held before on this commit", flush=True)
            continue
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            print(f"FAIL {part.name:<20} not reached in {_LIMIT_S:.0f} s; run it again", flush=True)
            n_failed += 1
            continue
        outcome = run_part(part, python, is_dry=asked.dry_run, left_s=left_s)
        print(outcome, flush=True)
        n_failed += not outcome.passed
        if not asked.dry_run:
            keep(outcome, asked.out, commit)
    kind = (
        "started, nothing was measured: a dry run"
        if asked.dry_run
        else f"hold; files in {asked.out}"
    )
    print(f"{len(chosen) - n_failed} of {len(chosen)} parts {kind}")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
