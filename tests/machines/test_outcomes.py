"""A guest's console becomes one outcome per check, also where the guest died."""

from scripts.machines.outcomes import Outcome, read_outcomes

PLAN = '@machine {"plan": ["check", "up"], "release": "6.1.0"}'
PASSED = '@machine {"check": "check", "passed": true, "detail": "fine", "took_s": 1.5}'
FAILED = '@machine {"check": "up", "passed": false, "detail": "nobody named", "took_s": 2}'
BOOTED = Outcome("m", "boot", passed=True, detail="Linux 6.1.0")


def test_each_line_of_a_guest_is_one_outcome_and_the_kernel_s_lines_are_none():
    lines = ["[ 1.0] something", PLAN, PASSED, f"[ 2.0] {FAILED}", '@machine {"end": true}']
    assert list(read_outcomes("m", lines)) == [
        BOOTED,
        Outcome("m", "check", passed=True, detail="fine", took_s=1.5),
        Outcome("m", "up", passed=False, detail="nobody named", took_s=2.0),
    ]


def test_checks_that_a_guest_never_came_to_have_failed():
    *_, last = read_outcomes("m", [PLAN, PASSED])
    assert (last.check, last.passed) == ("up", False)


def test_a_line_that_the_kernel_broke_is_a_check_that_did_not_end():
    outcomes = list(read_outcomes("m", [PLAN, PASSED[:30], FAILED, '@machine {"end": true}']))
    assert [(one.check, one.passed) for one in outcomes] == [
        ("boot", True),
        ("up", False),
        ("check", False),
    ]


def test_a_machine_that_tells_nothing_did_not_boot():
    (only,) = read_outcomes("m", ["Kernel panic - not syncing"])
    assert (only.check, only.passed) == ("boot", False)
