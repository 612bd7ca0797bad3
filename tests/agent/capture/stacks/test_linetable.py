"""Lines of instructions are those that each interpreter itself gives, for every function of two big modules.

No root.
"""

import json
import subprocess

import pytest
from tests.support.interpreters import find_interpreters

from ingero.agent.capture.stacks.linetable import TableKind, find_line

DUMP = """
import json, sys, types, argparse, typing, dis
told = []
def visit(code):
    if sys.version_info >= (3, 10):
        table = code.co_linetable
        lines = [[a, b, line] for a, b, line in code.co_lines()]
    else:
        table = code.co_lnotab
        starts = list(dis.findlinestarts(code))
        ends = [a for a, _ in starts[1:]] + [len(code.co_code)]
        lines = [[a, b, line] for (a, line), b in zip(starts, ends)]
    told.append([code.co_firstlineno, table.hex(), lines])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            visit(constant)
for module in argparse, typing:
    with open(module.__file__) as file:
        visit(compile(file.read(), module.__file__, "exec"))
print(json.dumps(told))
"""
KINDS = {9: TableKind.LNOTAB, 10: TableKind.LINES}


@pytest.mark.parametrize("python", find_interpreters(), ids=lambda python: str(python.program))
def test_every_instruction_has_the_interpreter_s_own_line(python):
    told = subprocess.run(
        [python.program, "-c", DUMP], capture_output=True, text=True, check=True
    ).stdout
    kind = KINDS.get(python.minor, TableKind.LOCATIONS)
    n_lines = 0
    for first_line, table, lines in json.loads(told):
        data = bytes.fromhex(table)
        # About fifty of each: finding one reads the table from its begin.
        for start, end, line in lines[:: len(lines) // 50 + 1]:
            for offset in {start, end - 2} if end > start else ():
                assert find_line(kind, data, first_line, offset) == line
                n_lines += 1
    assert n_lines > 2000


def test_an_instruction_behind_a_damaged_table_has_no_line_and_one_before_it_the_first():
    for kind in (TableKind.LINES, TableKind.LOCATIONS):
        assert find_line(kind, b"", 7, 0) is None
    assert find_line(TableKind.LNOTAB, b"\x02", 7, 40) == 7
    assert find_line(TableKind.LOCATIONS, b"\xf0\xff\xff\xff", 7, 400) is None
    assert find_line(TableKind.LOCATIONS, b"\xf0", 7, -2) == 7
