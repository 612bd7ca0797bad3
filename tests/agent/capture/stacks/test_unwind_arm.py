"""Copied stacks of arm64 are followed outwards: return addresses in x30 or saved, signed or replaced. Needs no root."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.agent.capture.kernel.abi import MAX_NATIVE, RETURN_BIT, UnwindKind
from ingero.agent.capture.stacks.memory import Region
from ingero.agent.capture.stacks.native import find_address_mask, is_signal_return
from ingero.agent.capture.stacks.rules import UNKNOWN, UnwindRule
from ingero.agent.capture.stacks.unwind import StackCopy, unwind

BASE = 0xFFFF_F000_0000
CODE = range(0xAAAA_0000, 0xAAAB_0000)
INNER, MIDDLE, OUTER, LAST = 0xAAAA_1000, 0xAAAA_2000, 0xAAAA_3000, 0xAAAA_4000
MASK = (1 << 48) - 1
SIGNED = 0x2A << 48  # what paciasp leaves above an address
TRAMPOLINE = 0xFFFF_E000
END = UnwindRule(UnwindKind.END)
RECORD = UnwindRule(UnwindKind.RECORD)
SAVED = UnwindRule(UnwindKind.SP, 32, -32, -24)  # stp x29, x30, [sp, #-32]!


class Code:
    """Code with these rules, by the address that is asked for."""

    def __init__(self, rules):
        self.rules = rules

    def is_code(self, address):
        return address in CODE

    def find_rule(self, address):
        return self.rules.get(address)

    def strip(self, address):
        return address & MASK


def follow(words, rules, *, sp=0x20, bp=0, link=0, returns=(), n_bytes=0x2000, is_sp_least=False):
    """Follow a stack with these words at these offsets; places are told from its begin."""
    data = bytearray(n_bytes)
    for at, value in words.items():
        data[at : at + 8] = value.to_bytes(8, "little")
    copy = StackCopy(
        *(INNER, BASE + sp, BASE + bp if bp else 0, bytes(data)),
        {BASE + at: value for at, value in returns},
        link,
        is_sp_least,
    )
    return unwind(copy, Code(rules), is_arm=True)


def key(address):
    return address | RETURN_BIT


def test_a_leaf_s_caller_is_in_x30_and_further_out_it_is_where_the_rule_says():
    words = {
        0x20: BASE + 0x60,  # MIDDLE: x29 and, signed, x30 at its frame's begin
        0x28: OUTER | SIGNED,
        0x70: LAST,  # OUTER: found by x29, saved without it
    }
    rules = {
        INNER: UnwindRule(UnwindKind.SP),
        MIDDLE - 1: SAVED,
        OUTER - 1: UnwindRule(UnwindKind.BP, 32, 0, -16),
        LAST - 1: END,
    }
    found = follow(words, rules, link=MIDDLE | SIGNED)
    assert found.addresses == [INNER, MIDDLE, OUTER, LAST]
    assert (found.is_cut, found.is_unknown) == (False, False)
    assert found.rules == {
        INNER: rules[INNER],
        key(MIDDLE): SAVED,
        key(OUTER): rules[OUTER - 1],
        key(LAST): END,
    }


def test_x30_leads_on_once_only():
    leaf = UnwindRule(UnwindKind.SP)
    found = follow({}, {INNER: leaf, MIDDLE - 1: leaf}, link=MIDDLE)
    assert found.addresses == [INNER, MIDDLE]
    assert found.is_unknown
    assert found.rules[key(MIDDLE)] == UNKNOWN


def test_a_return_address_that_a_probe_replaced_is_found_by_the_function_s_cfa():
    returns = [(0x40, MIDDLE), (0x60, OUTER)]
    saved = {0x28: TRAMPOLINE | SIGNED, 0x48: TRAMPOLINE}
    found = follow(saved, {INNER: SAVED, MIDDLE - 1: SAVED, OUTER - 1: END}, returns=returns)
    assert found.addresses == [INNER, MIDDLE, OUTER]
    leaf = {INNER: UnwindRule(UnwindKind.SP), MIDDLE - 1: END}
    assert follow({}, leaf, link=TRAMPOLINE, returns=[(0x20, MIDDLE)]).addresses == [INNER, MIDDLE]


def test_a_signal_handler_s_interrupted_function_has_its_x30_again():
    begin = 0x40  # of what the kernel pushed: 312 bytes on, x0 to x30, sp, pc
    registers = begin + 312
    words = {
        0x28: MIDDLE,  # where the handler returns to
        registers + 8 * 29: BASE + 0x600,
        registers + 8 * 30: LAST,
        registers + 8 * 31: BASE + 0x500,
        registers + 8 * 32: OUTER,
    }
    rules = {
        INNER: SAVED,
        MIDDLE - 1: UnwindRule(UnwindKind.SIGNAL),
        OUTER: UnwindRule(UnwindKind.SP, 16),  # interrupted there: the address itself
        LAST - 1: END,
    }
    found = follow(words, rules)
    assert found.addresses == [INNER, MIDDLE, OUTER, LAST]
    assert not found.is_unknown


def test_code_without_a_table_is_followed_by_its_frame_records():
    words = {0x40: BASE + 0x80, 0x48: MIDDLE | SIGNED, 0x80: BASE + 0xC0, 0x88: OUTER, 0xC8: 0x1234}
    found = follow(words, {}, bp=0x40)
    assert found.addresses == [INNER, MIDDLE, OUTER]
    assert found.is_unknown
    assert found.rules == {INNER: RECORD, key(MIDDLE): RECORD, key(OUTER): UNKNOWN}
    assert follow({0x40: 0, 0x48: MIDDLE}, {}, bp=0x40).rules[key(MIDDLE)] == END


def test_behind_a_frame_record_the_stack_pointer_is_known_again_from_the_next():
    # Without a table up to 0x50; MIDDLE's frame is of 64 bytes from 0x80, OUTER's from 0xc0: sp is right again.
    words = {0x40: BASE + 0x80, 0x48: MIDDLE, 0x80: BASE + 0x200, 0x88: OUTER, 0xC8: LAST}
    rules = {MIDDLE - 1: UnwindRule(UnwindKind.SP, 64, -64, -56), OUTER - 1: SAVED, LAST - 1: END}
    assert follow(words, rules, bp=0x40).addresses == [INNER, MIDDLE, OUTER, LAST]
    # The same from a copy that begins in MIDDLE, and by x29 itself.
    inner = {INNER: rules[MIDDLE - 1], OUTER - 1: SAVED, LAST - 1: END}
    assert follow(words, inner, sp=0x50, bp=0x80, is_sp_least=True).addresses == [
        INNER,
        OUTER,
        LAST,
    ]
    inner[INNER] = UnwindRule(UnwindKind.BP, 64, -64, -56)
    assert follow(words, inner, sp=0x50, bp=0x80, is_sp_least=True).addresses == [
        INNER,
        OUTER,
        LAST,
    ]


@pytest.mark.parametrize(
    "rule",
    [
        UnwindRule(UnwindKind.SP, 16, 0, -16),  # nothing tells where its frame is
        UnwindRule(UnwindKind.SP, 32, -32, -8),
        UnwindRule(UnwindKind.SP),
        UnwindRule(UnwindKind.SIGNAL),
    ],
)
def test_where_the_stack_pointer_is_not_known_a_rule_by_it_alone_ends_the_stack(rule):
    words = dict.fromkeys(range(0, 4096, 8), MIDDLE)
    found = follow(words, {INNER: rule}, sp=0x50, bp=0x80, is_sp_least=True)
    assert found.addresses == [INNER]
    assert found.rules == {INNER: UNKNOWN}


@pytest.mark.parametrize(
    "rule",
    [
        UNKNOWN,
        UnwindRule(UnwindKind.REALIGNED, 8, 8),  # of x86-64
        UnwindRule(UnwindKind.SP, -16, 0, -8),
        UnwindRule(UnwindKind.SP, 0, 0, -8),
        UnwindRule(UnwindKind.BP, 16, 0, -8),  # x29 lies below the stack
        RECORD,
        UnwindRule(UnwindKind.SP),  # x30 holds nothing
        UnwindRule(UnwindKind.SP, 0x40, 0, -8),  # no code
    ],
)
def test_what_does_not_lead_outwards_into_code_ends_the_stack_and_is_told_to_the_kernel(rule):
    found = follow({0x58: 0x9999}, {INNER: rule}, bp=-0x1000)
    assert found.addresses == [INNER]
    assert found.is_unknown
    assert found.rules == {INNER: UNKNOWN}


def test_a_stack_that_is_deeper_than_its_copy_is_said_to_be_and_its_rules_are_kept():
    found = follow({0x28: MIDDLE}, {INNER: SAVED, MIDDLE - 1: SAVED}, n_bytes=0x40)
    assert (found.addresses, found.is_cut, found.is_unknown) == ([INNER, MIDDLE], True, False)
    assert found.rules == {INNER: SAVED, key(MIDDLE): SAVED}


@pytest.mark.parametrize(
    ("stack_end", "n_bits"),
    [
        (0x7F_FFF0_2000, 39),  # Android's and older boards' kernels
        (0x3FF_FFD2_0000, 42),
        (0x7FFF_FFC3_0000, 47),
        (0xFFFF_FFC3_0000, 48),  # with 52 bits as well: the kernel stays below 48 unless asked
        (0xF_FFFF_FFFF_0000, 52),
    ],
)
def test_addresses_have_as_many_bits_as_the_process_may_address(stack_end, n_bits):
    regions = [
        Region(0xAAAA_0000, 0xAAAB_0000, 0, True, ("08:01", 7), "/usr/bin/true"),
        Region(stack_end - 0x21000, stack_end, 0, False, ("00:00", 0), "[stack]"),
    ]
    assert find_address_mask(regions) == (1 << n_bits) - 1
    assert find_address_mask([]) == -1  # a process that is gone


class Memory:
    """Memory of these bytes from an address on."""

    def __init__(self, begin, data):
        self.begin, self.data = begin, data

    def read(self, address, n_bytes):
        at = address - self.begin
        return self.data[at : at + n_bytes] if at >= 0 else b""


def test_the_return_from_a_signal_handler_is_known_by_its_instructions():
    # Of Linux 6.12's vDSO: nop; mov x8, #0x8b; svc #0
    memory = Memory(0x1000, bytes.fromhex("1f2003d5 681180d2 010000d4 00000000"))
    assert is_signal_return(memory, 0x1004)
    assert is_signal_return(memory, 0x1003)  # as for a return address
    assert not any(is_signal_return(memory, at) for at in (0x1000, 0x1005, 0x1008, 0x2000))


rule_of_any_kind = st.builds(
    UnwindRule,
    st.sampled_from(UnwindKind),
    st.integers(-256, 4096),
    st.integers(-64, 64),
    st.integers(-64, 64),
)


@settings(max_examples=200, deadline=None)
@given(
    words=st.dictionaries(
        st.integers(0, 255).map(lambda at: at * 8),
        st.one_of(
            st.sampled_from([INNER, MIDDLE, OUTER, LAST, 0]),
            st.integers(0, 4095).map(lambda at: BASE + at),
            st.integers(0, (1 << 64) - 1),
        ),
        max_size=200,
    ),
    rules=st.dictionaries(
        st.sampled_from([INNER, MIDDLE - 1, OUTER - 1, LAST - 1, MIDDLE, OUTER]), rule_of_any_kind
    ),
    bp=st.integers(-64, 4096),
    link=st.sampled_from([0, MIDDLE, INNER, 7]),
)
def test_any_stack_comes_to_an_end(words, rules, bp, link):
    found = follow(words, rules, bp=bp, link=link)
    assert 1 <= len(found.addresses) <= MAX_NATIVE + 1
    assert all(address in CODE for address in found.addresses)
    assert all(len(rule.to_bytes()) == 16 for rule in found.rules.values())
