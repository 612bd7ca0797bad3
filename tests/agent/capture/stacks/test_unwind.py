"""Copied stacks are followed outwards, and what cannot be followed ends them. Needs no root."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.agent.capture.kernel.abi import MAX_NATIVE, RETURN_BIT, UnwindKind, get_dtype
from ingero.agent.capture.stacks.rules import UNKNOWN, UnwindRule
from ingero.agent.capture.stacks.unwind import StackCopy, unwind

BASE = 0x7FFC_0000_0000
CODE = range(0x40_0000, 0x50_0000)
INNER, MIDDLE, OUTER, LAST = 0x40_1000, 0x40_2000, 0x40_3000, 0x40_4000
TRAMPOLINE = 0x7FFF_F000
END = UnwindRule(UnwindKind.END)


class Code:
    """Code with these rules, by the address that is asked for."""

    def __init__(self, rules):
        self.rules = rules

    def is_code(self, address):
        return address in CODE

    def find_rule(self, address):
        return self.rules.get(address)

    def strip(self, address):
        return address & (1 << 47) - 1


def build_copy(words, pc=INNER, sp=0x20, bp=0, returns=(), n_bytes=0x2000):
    """A stack with these words at these offsets; places are told from its begin."""
    data = bytearray(n_bytes)
    for at, value in words.items():
        data[at : at + 8] = value.to_bytes(8, "little")
    return StackCopy(
        pc, BASE + sp, BASE + bp if bp else 0, bytes(data), {BASE + at: value for at, value in returns}
    )  # fmt: skip


def key(address):
    return address | RETURN_BIT


def test_each_kind_of_rule_leads_to_the_caller():
    handler = 0x100  # where the frame that the kernel pushed begins, behind its return address
    words = {
        0x38: MIDDLE,  # rsp + 32 is the CFA
        0x30: BASE + 0x80,  # rbp of the middle one
        0x88: OUTER,  # rbp + 16
        0x80: BASE + 0xC0,
        0xB0: BASE + 0xF0,  # *(rbp - 16) is the CFA, and rbp is at rbp + 8
        0xC8: 0xB0B,
        0xE8: LAST,
        # On the way from LAST a signal handler: sp is 0xf0 there.
        0xF8: 0x40_5000,
        handler + 168: 0x40_6000,
        handler + 160: BASE + 0x400,
        handler + 120: 0xBBB,
        0x408: 0x40_7000,
    }
    rules = {
        INNER: UnwindRule(UnwindKind.SP, 32, -16),
        MIDDLE - 1: UnwindRule(UnwindKind.BP, 16, -16),
        OUTER - 1: UnwindRule(UnwindKind.REALIGNED, -16, 8),
        LAST - 1: UnwindRule(UnwindKind.SP, 16),
        0x40_5000 - 1: UnwindRule(UnwindKind.SIGNAL),
        0x40_6000: UnwindRule(UnwindKind.SP, 16),  # interrupted there: the address itself
        0x40_7000 - 1: END,
    }
    found = unwind(build_copy(words), Code(rules))
    assert found.addresses == [INNER, MIDDLE, OUTER, LAST, 0x40_5000, 0x40_6000, 0x40_7000]
    assert (found.is_cut, found.is_unknown) == (False, False)
    assert found.rules == {
        INNER: rules[INNER],
        key(MIDDLE): rules[MIDDLE - 1],
        key(OUTER): rules[OUTER - 1],
        key(LAST): rules[LAST - 1],
        key(0x40_5000): rules[0x40_5000 - 1],
        0x40_6000: rules[0x40_6000],
        key(0x40_7000): END,
    }


def test_a_return_address_that_a_probe_replaced_is_the_program_s_own():
    rules = {INNER: UnwindRule(UnwindKind.SP, 8), MIDDLE - 1: END}
    copy = build_copy({0x20: TRAMPOLINE}, returns=[(0x20, MIDDLE), (0x900, OUTER)])
    assert unwind(copy, Code(rules)).addresses == [INNER, MIDDLE]


def test_code_without_a_table_is_followed_by_frame_pointer_while_that_leads_to_code():
    words = {0x48: MIDDLE, 0x40: BASE + 0x80, 0x88: OUTER, 0x80: BASE + 0xC0, 0xC8: 0x1234}
    found = unwind(build_copy(words, bp=0x40), Code({}))
    assert found.addresses == [INNER, MIDDLE, OUTER]
    assert found.is_unknown
    by_pointer = UnwindRule(UnwindKind.BP, 16, -16)
    assert found.rules == {INNER: by_pointer, key(MIDDLE): by_pointer, key(OUTER): UNKNOWN}


def test_a_frame_pointer_of_zero_is_the_end():
    found = unwind(build_copy({0x48: MIDDLE, 0x40: 0}, bp=0x40), Code({}))
    assert found.addresses == [INNER, MIDDLE]
    assert not found.is_unknown
    assert found.rules[key(MIDDLE)] == END


def test_a_return_address_of_zero_is_the_end():
    found = unwind(build_copy({}), Code({INNER: UnwindRule(UnwindKind.SP, 16)}))
    assert (found.addresses, found.is_unknown, found.is_cut) == ([INNER], False, False)


@pytest.mark.parametrize(
    "rule",
    [UNKNOWN, UnwindRule(UnwindKind.SP, -8), UnwindRule(UnwindKind.SP, 0), UnwindRule(UnwindKind.BP, 16), UnwindRule(UnwindKind.SP, 40)],
)  # fmt: skip
def test_what_does_not_lead_outwards_into_code_ends_the_stack_and_is_told_to_the_kernel(rule):
    # rsp + 40 holds an address that is no code; rbp lies below the stack.
    found = unwind(build_copy({0x40: 0x9999}, bp=-0x1000), Code({INNER: rule}))
    assert found.addresses == [INNER]
    assert found.is_unknown
    assert found.rules == {INNER: UNKNOWN}


def test_a_stack_that_is_deeper_than_its_copy_is_said_to_be_and_its_rules_are_kept():
    rule = UnwindRule(UnwindKind.SP, 16)
    words = {0x28 + 16 * i: MIDDLE for i in range(1000)}
    found = unwind(build_copy(words), Code({INNER: rule, MIDDLE - 1: rule}), 0)
    assert found.is_cut
    assert len(found.addresses) == MAX_NATIVE + 1 or found.addresses[-1] == MIDDLE
    found = unwind(build_copy({0x28: MIDDLE}, n_bytes=0x38), Code({INNER: rule, MIDDLE - 1: rule}))
    assert (found.addresses, found.is_cut, found.is_unknown) == ([INNER, MIDDLE], True, False)
    assert found.rules == {INNER: rule, key(MIDDLE): rule}


def test_frames_in_all_are_bounded():
    rule = UnwindRule(UnwindKind.SP, 8)
    words = {0x20 + 8 * i: MIDDLE for i in range(1000)}
    code = Code({INNER: rule, MIDDLE - 1: rule})
    for n_before in (1, 100):
        found = unwind(build_copy(words), code, n_before)
        assert n_before + len(found.addresses) == MAX_NATIVE + 1
        assert found.is_cut


def test_a_record_is_read_as_the_kernel_wrote_it():
    record = np.zeros(1, get_dtype("stack_copy"))[0]
    for name, value in (("pc", key(INNER)), ("sp", BASE + 0x18), ("bp", 7), ("n_bytes", 4096)):
        record[name] = value
    record["returns"]["slot"][:4] = 8, 16, 16, 0
    record["returns"]["address"][:4] = 1, 2, 3, 4
    record["data"][:16] = np.frombuffer(np.array([5, 6], "<u8").tobytes(), "u1")
    copy = StackCopy.from_record(record)
    assert (copy.pc, copy.sp, copy.bp, len(copy.data)) == (key(INNER), BASE + 0x18, 7, 4096)
    assert copy.returns == {8: 1, 16: 3}  # of two probes on one place the outer one knows
    assert [copy.find_word(BASE + at) for at in (0, 8, 4088, 4089, -8)] == [5, 6, 0, None, None]


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
)
def test_any_stack_comes_to_an_end(words, rules, bp):
    found = unwind(build_copy(words, bp=bp), Code(rules))
    assert 1 <= len(found.addresses) <= MAX_NATIVE + 1
    assert all(address in CODE for address in found.addresses)
    assert all(len(rule.to_bytes()) == 16 for rule in found.rules.values())
