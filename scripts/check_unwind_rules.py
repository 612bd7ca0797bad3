"""``python -m scripts.check_unwind_rules FILE…``: our rules of arm64 files against what readelf finds.

Needs ``readelf`` (Debian's package ``binutils``); the files are only read, so any machine can do it. LLVM 14's reader
is of no use: it does not restore the CFA with DW_CFA_restore_state. Prints per file how many rows of its unwind table
agree, how many rows we say nothing of and why, and the first disagreements.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ingero.agent.capture.kernel.abi import UnwindKind
from ingero.agent.capture.kernel.elf import read_headers
from ingero.agent.capture.stacks.registers import AARCH64
from ingero.agent.capture.stacks.rules import UNKNOWN, UnwindRule
from ingero.agent.capture.stacks.unwind_table import UnwindTable
from ingero.errors import BadDataError

_ENTRY: Final = re.compile(
    r"[0-9a-f]+ [0-9a-f]+ [0-9a-f]+ FDE cie=([0-9a-f]+) pc=([0-9a-f]+)\.\.([0-9a-f]+)"
)
_COMMON: Final = re.compile(r"([0-9a-f]+) [0-9a-f]+ [0-9a-f]+ CIE .* ra=(\d+)")
_CFA: Final = re.compile(r"(\w+)([+-]\d+)")
_IN_REGISTER: Final = re.compile(r"r\d+ \((\w+)\)")
_SAVED: Final = re.compile(r"c([+-]\d+)")
_KINDS: Final = {"sp": UnwindKind.SP, "x29": UnwindKind.BP}
_END: Final = UnwindRule(UnwindKind.END)
_MAX_SHOWN: Final = 10


class Row(NamedTuple):
    """A row of an unwind table: the addresses that it is for, and what it says; None for what no rule says.

    Attributes:
        first: The first address.
        last: The last one.
        rule: The rule that follows from it.
        reason: Why none does.
    """

    first: int
    last: int
    rule: UnwindRule | None
    reason: str


def iter_rows(path: Path) -> Iterator[Row]:
    """Every row, as readelf decodes it."""
    command = ["readelf", "-W", "--debug-dump=frames-interp", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        columns: list[str] = []
        others: set[str] = set()  # common entries whose return address is in another register
        rows: list[tuple[int, list[str]]] = []
        begin = end = 0
        for line in process.stdout:
            words = _IN_REGISTER.sub(r"in-\1", line).split()
            if (common := _COMMON.match(line)) and int(common[2]) != AARCH64.address:
                others.add(common[1])
            elif entry := _ENTRY.match(line):
                begin, end, columns, rows = int(entry[2], 16), int(entry[3], 16), [], []
                if entry[1] in others:
                    yield Row(begin, end - 1, None, "ra is another column")
                    end = 0
            elif not words and end:
                yield from _close_entry(rows or [(begin, ["sp+0"])], columns, end)
                end = 0
            elif end and words[0] == "LOC":
                columns = words[1:]
            elif end:
                rows.append((int(words[0], 16), words[1:]))


def _close_entry(rows: list[tuple[int, list[str]]], columns: list[str], end: int) -> Iterator[Row]:
    for (begin, cells), following in zip(rows, [*(row[0] for row in rows[1:]), end], strict=True):
        if begin < following:  # else the next one replaces it
            yield _build_row(
                begin, following - 1, dict(zip(columns or ["CFA"], cells, strict=True))
            )


def _build_row(first: int, last: int, cells: dict[str, str]) -> Row:
    cfa = _CFA.fullmatch(cells["CFA"])
    places = [0, 0]
    for i, name in enumerate(("x29", "ra")):
        saved = _SAVED.fullmatch(cells.get(name, "u"))
        if saved:
            places[i] = int(saved[1])
        elif cells.get(name, "u") not in {"u", "s"}:
            return Row(first, last, None, f"{name} is {cells[name]}")
    if not cfa or cfa[1] not in _KINDS:
        return Row(first, last, None, f"CFA is {cfa[1] if cfa else cells['CFA']}")
    return Row(first, last, UnwindRule(_KINDS[cfa[1]], int(cfa[2]), *places), "")


def compare(path: Path) -> tuple[Counter[str], list[str]]:
    """How many rows came to what, and the first disagreements in words."""
    data = path.read_bytes()
    table = UnwindTable(data, read_headers(data)[1])
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for row in iter_rows(path):
        ours = {table.find_rule(address) for address in (row.first, row.last)}
        if row.rule is not None and ours == {row.rule}:
            counts["agree"] += 1
            counts[row.rule.kind.name] += 1
            counts["address in x30"] += not row.rule.return_offset
        elif row.rule is not None and not row.rule.return_offset and ours == {_END}:
            counts["END"] += (
                1  # readelf writes an undefined return address as one that was not saved
            )
        elif row.rule is None and ours <= {None, UNKNOWN}:  # None: as if there were no table
            counts["no rule: " + row.reason] += 1
        else:
            counts["WRONG"] += 1
            wrong.append(
                f"{row.first:#x}..{row.last:#x}: readelf {row.rule or row.reason}, ours {ours}"
            )
    return counts, wrong


def main(arguments: list[str]) -> int:
    """Compare the files; 1 when a row disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="arm64 programs and libraries"
    )
    if shutil.which("readelf") is None:
        parser.error("there is no readelf; install the package binutils")
    n_wrong = 0
    for path in parser.parse_args(arguments).files:
        try:
            counts, wrong = compare(path)
        except BadDataError as error:
            print(f"{path}: {error}")
            continue
        n_wrong += len(wrong)
        said = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
        print(f"{path}: {said}", *wrong[:_MAX_SHOWN], sep="\n  ", flush=True)
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
