"""What `ingero hang` says of a case, compared with how the hang was made."""

import json
import shutil
from pathlib import Path

from ingero.detect.hang import find_hang
from ingero.wire.flight_recorder.job import read_job

RIGHT, UNKNOWN, WRONG = "right", "unknown", "wrong"


def read_label(folder):
    """The label that was written when the hang was made."""
    return json.loads((folder / "label.json").read_text())


def judge(folder):
    """``right``, ``unknown`` or ``wrong``, and the report.

    Right is exactly the ranks at fault, or ``nobody`` where nobody hangs. Unknown names no rank. All else is wrong: an innocent
    rank, one of two, nobody where somebody hangs, or a refused dump.
    """
    report = find_hang(read_job(folder))
    at_fault = tuple(read_label(folder)["at_fault"])
    if report.missing_ranks != at_fault:
        is_open = not report.missing_ranks and report.verdict == "unknown"
        return (UNKNOWN if is_open else WRONG), report
    return (RIGHT if at_fault or report.verdict == "nobody" else UNKNOWN), report


def copy_without_stacks(folder, into):
    """The same case as a user has it who kept only the dumps."""
    copy = Path(into) / folder.name
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".txt":
            shutil.copy2(path, copy)
    return copy
