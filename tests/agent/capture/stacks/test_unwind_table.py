"""Rules of unwind tables against pyelftools, which decodes the same tables another way. Needs no root."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from elftools.dwarf.callframe import FDE, RegisterRule
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.compiler import CC

from ingero.agent.capture.kernel.abi import UnwindKind
from ingero.agent.capture.kernel.elf import read_headers, read_machine
from ingero.agent.capture.stacks.cfi import Common
from ingero.agent.capture.stacks.memory import iter_regions
from ingero.agent.capture.stacks.registers import AARCH64
from ingero.agent.capture.stacks.rules import UNKNOWN, UnwindRule, build_rule
from ingero.agent.capture.stacks.unwind_table import UnwindTable
from ingero.errors import BadDataError
from ingero.sim.runner import get_program

WORKLOAD = get_program()
LIBC = next(Path(region.path) for region in iter_regions(os.getpid()) if "/libc.so" in region.path)
RBP, RSP, RETURN = 6, 7, 16
X29, X30, SP = 29, 30, 31
SOME = 400  # of the C library's 3000 functions


def open_table(path):
    data = path.read_bytes()
    return UnwindTable(data, read_headers(data)[1])


def iter_files():
    """Files of the simulator, for both processors."""
    for machine in ("x86_64", "aarch64"):
        for name in ("workload", "libcudart.so.12"):
            yield WORKLOAD.parents[1] / machine / name


def read_entries(path):
    """The entries of functions as pyelftools sees them."""
    with path.open("rb") as file:
        entries = ELFFile(file).get_dwarf_info().EH_CFI_entries()
        return [entry for entry in entries if isinstance(entry, FDE)]


def iter_rows(path):
    """(first address, last address, row) as pyelftools decodes them."""
    entries = read_entries(path)
    for entry in entries[:: max(1, len(entries) // SOME)]:
        try:
            rows = entry.get_decoded().table
        except ValueError:  # pyelftools knows fewer instructions than glibc uses
            continue
        end = entry["initial_location"] + entry["address_range"]
        for row, following in zip(rows, [*rows[1:], {"pc": end}], strict=True):
            if row["pc"] < following["pc"] <= end:
                yield row["pc"], following["pc"] - 1, row


def build_expected(row):
    """The rule that a row asks for; None for one with expressions or a CFA by another register."""
    saved = row.get(RBP)
    if RETURN not in row or row[RETURN].type == RegisterRule.UNDEFINED:
        return UnwindRule(UnwindKind.END)
    if row["cfa"].reg not in {RBP, RSP} or (saved and saved.type == RegisterRule.EXPRESSION):
        return None
    offset = saved.arg if saved and saved.type == RegisterRule.OFFSET else 0
    kind = UnwindKind.SP if row["cfa"].reg == RSP else UnwindKind.BP
    return UnwindRule(kind, row["cfa"].offset, offset)


def build_expected_of_arm(row):
    """The same; a register without a rule keeps its value, and that of the return address is x30."""
    if X30 in row and row[X30].type == RegisterRule.UNDEFINED:
        return UnwindRule(UnwindKind.END)
    if row["cfa"].reg not in {X29, SP}:
        return None
    offsets = [row[one].arg if one in row else 0 for one in (X29, X30)]
    kind = UnwindKind.SP if row["cfa"].reg == SP else UnwindKind.BP
    return UnwindRule(kind, row["cfa"].offset, *offsets)


@pytest.mark.parametrize("path", [*iter_files(), LIBC], ids=str)
def test_rules_are_those_that_pyelftools_decodes(path):
    table = open_table(path)
    is_arm = read_machine(path.read_bytes()) == AARCH64.machine
    build = build_expected_of_arm if is_arm else build_expected
    kinds = set()
    n_rows = 0
    for first, last, row in iter_rows(path):
        expected = build(row)
        for address in {first, last}:
            rule = table.find_rule(address)
            if expected is not None:
                assert rule == expected, hex(address)
                n_rows += 1
            kinds.add(rule.kind)
    assert n_rows > 100
    assert {UnwindKind.SP, UnwindKind.BP} <= kinds
    assert table.find_rule(1) is None


def test_an_address_between_functions_has_no_rule():
    table = open_table(WORKLOAD)
    entries = read_entries(WORKLOAD)
    starts = np.array(sorted(e["initial_location"] for e in entries))
    ends = np.array(sorted(e["initial_location"] + e["address_range"] for e in entries))
    gaps = ends[:-1][ends[:-1] < starts[1:]]
    assert len(gaps)
    assert all(table.find_rule(int(address)) is None for address in gaps)
    assert all(table.find_rule(int(address)) is not None for address in starts)


def test_the_c_library_s_return_from_a_signal_handler_is_known():
    found = [
        entry["initial_location"]
        for entry in read_entries(LIBC)
        if b"S" in entry.cie["augmentation"]
    ]
    assert found
    table = open_table(LIBC)
    for begin in found:
        # The entry begins a byte early, so that the address before the handler's return is inside.
        assert table.find_rule(begin) == table.find_rule(begin + 1) == UnwindRule(UnwindKind.SIGNAL)


def common(instructions=b"\x0c\x07\x08\x90\x01", *, is_signal=False):
    """Of every x86-64 compiler: CFA = rsp + 8, the return address at CFA - 8."""
    return Common(1, -8, 0x1B, is_signal, True, instructions)


@pytest.mark.parametrize(("inside", "pushed"), [(0, 8), (10, 8), (11, 16), (15, 16)])
def test_an_entry_of_a_linkage_table_has_its_rule_by_address(inside, pushed):
    expression = bytes.fromhex("0f 0b 77 08 80 00 3f 1a 3b 2a 33 24 22")
    rule = build_rule(common(), expression, inside, 0x1020 + inside)
    assert rule == UnwindRule(UnwindKind.SP, pushed)


def test_a_function_that_aligns_its_stack_is_followed_through_its_frame():
    # DW_CFA_expression: rbp at rbp + 0; DW_CFA_def_cfa_expression: *(rbp - 40), as GCC 12 writes them.
    instructions = bytes.fromhex("10 06 02 76 00 0f 03 76 58 06")
    assert build_rule(common(), instructions, 0, 0) == UnwindRule(UnwindKind.REALIGNED, -40, 0)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("", UnwindRule(UnwindKind.SP, 8)),
        ("0e 10 86 02", UnwindRule(UnwindKind.SP, 16, -16)),  # push %rbp
        ("0e 10 86 02 0d 06", UnwindRule(UnwindKind.BP, 16, -16)),  # mov %rsp,%rbp
        ("0e 10 86 02 0a 0e 80 02 c6 0b", UnwindRule(UnwindKind.SP, 16, -16)),  # remember, restore
        ("0e 10 86 02 c6", UnwindRule(UnwindKind.SP, 16)),
        (
            "0e 20 41 0e 40",
            UnwindRule(UnwindKind.SP, 32),
        ),  # what comes after the address is not run
        ("12 07 7e", UnwindRule(UnwindKind.SP, 16)),
        ("13 7c", UnwindRule(UnwindKind.SP, 32)),
        ("11 06 02 0e 20", UnwindRule(UnwindKind.SP, 32, -16)),
        ("2f 06 02", UnwindRule(UnwindKind.SP, 8, 16)),
        ("0e 20 2e 10", UnwindRule(UnwindKind.SP, 32)),
        ("07 10", UnwindRule(UnwindKind.END)),  # the outermost function
        ("0d 03", UNKNOWN),  # CFA by rbx
        ("09 06 03", UNKNOWN),  # rbp is in rbx
        ("09 10 03", UNKNOWN),
        ("90 02", UNKNOWN),
        ("0f 02 73 08", UNKNOWN),
        ("0e 80 80 80 80 10", UNKNOWN),  # does not fit
    ],
)
def test_instructions_say_where_the_caller_is(instructions, expected):
    assert build_rule(common(), bytes.fromhex(instructions), 0, 0) == expected


def common_of_arm(instructions=b"\x0c\x1f\x00", *, is_signal=False):
    """Of every arm64 compiler: CFA = sp, the return address in x30."""
    return Common(4, -8, 0x1B, is_signal, True, instructions, AARCH64)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("", UnwindRule(UnwindKind.SP)),
        # paciasp; stp x29, x30, [sp, #-32]!; mov x29, sp with the CFA by it
        ("2d 0e 20 9d 04 9e 03", UnwindRule(UnwindKind.SP, 32, -32, -24)),
        ("2d 0e 20 9d 04 9e 03 0d 1d", UnwindRule(UnwindKind.BP, 32, -32, -24)),
        ("2c 0e 10 9e 02", UnwindRule(UnwindKind.SP, 16, 0, -16)),  # without a frame pointer
        ("0e 20 9d 04 9e 03 44 de dd 0e 00", UnwindRule(UnwindKind.SP, 32, -32, -24)),
        ("0e 20 9d 04 9e 03 de dd 0e 00", UnwindRule(UnwindKind.SP)),  # at ret
        (
            "0e a0 80 08 9d 84 80 01 9e 83 80 01",  # 128 KiB of variables above what is saved
            UnwindRule(UnwindKind.SP, 131_104, -131_104, -131_096),
        ),
        ("07 1e", UnwindRule(UnwindKind.END)),
        ("0c 00 10", UNKNOWN),  # CFA by x0, as where contexts are switched
        ("09 1e 0f", UNKNOWN),  # x30 is in x15, as in the C library's rawmemchr
        ("10 1d 02 8f 00", UNKNOWN),
        ("0f 02 8f 10", UNKNOWN),
    ],
)
def test_instructions_of_arm64_say_where_the_return_address_is_saved(instructions, expected):
    assert build_rule(common_of_arm(), bytes.fromhex(instructions), 0, 0) == expected


def test_what_follows_on_arm64_is_counted_in_instructions_of_four_bytes():
    instructions = bytes.fromhex("0e 20 9d 04 9e 03 48 de dd 0e 00")
    rules = [build_rule(common_of_arm(), instructions, inside, 0) for inside in (31, 32)]
    assert rules == [UnwindRule(UnwindKind.SP, 32, -32, -24), UnwindRule(UnwindKind.SP)]


def test_a_file_of_another_processor_has_no_rules():
    data = bytearray(WORKLOAD.read_bytes())
    data[18:20] = (243).to_bytes(2, "little")  # RISC-V
    with pytest.raises(BadDataError, match="not unwound"):
        UnwindTable(bytes(data), read_headers(bytes(data))[1])


@pytest.mark.parametrize(
    "instructions", ["01", "3f", "0b", "0e", "0f 7f 00", "0e" + "ff" * 30, "0a" * 100, "0f 02 77 08 0e 10"]
)  # fmt: skip
def test_damaged_instructions_are_refused(instructions):
    with pytest.raises(BadDataError):
        build_rule(common(), bytes.fromhex(instructions), 0, 0)


def test_signal_frames_of_another_layout_are_not_followed():
    assert build_rule(common(is_signal=True), b"", 0, 0) == UNKNOWN


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_tables_give_rules_or_none_and_end(data):
    whole = bytearray((WORKLOAD.parent / "libcudart.so.12").read_bytes())
    segments = read_headers(bytes(whole))[1]
    (table,) = segments[segments["type"] == 0x6474E550]
    begin = int(table["offset"])
    for _ in range(data.draw(st.integers(1, 12))):
        # The sorted table is at the begin, the entries lie behind it.
        at = begin + data.draw(st.integers(0, int(table["memory_size"]) + 1400))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        damaged = UnwindTable(bytes(whole), segments)
    except BadDataError:
        return
    for address in range(0x1900, 0x5000, 61):
        rule = damaged.find_rule(address)
        assert rule is None or len(rule.to_bytes()) == 16


def test_a_stripped_file_keeps_its_rules_and_one_without_a_table_is_refused(tmp_path):
    source = tmp_path / "one.c"
    source.write_text("int called(int);\nint shown(int a) { return called(a) + 1; }\n")
    full, stripped, bare = tmp_path / "full.so", tmp_path / "stripped.so", tmp_path / "bare.so"
    for path, *options in (
        (full,),
        (stripped, "-s"),
        (bare, "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"),
    ):
        subprocess.run(
            [
                *(*CC, "-shared", "-nostdlib", "-fPIC", "-O1"),
                *(*options, str(source), "-o", str(path)),
            ],
            check=True,
        )
    tables = [open_table(path) for path in (full, stripped)]
    with full.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        (shown,) = table.get_symbol_by_name("shown")
    begin = shown["st_value"]
    assert [table.find_rule(begin) for table in tables] == [UnwindRule(UnwindKind.SP, 8)] * 2
    with pytest.raises(BadDataError, match="no unwind table"):
        open_table(bare)
