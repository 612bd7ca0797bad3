"""What is said of a BPF object that the kernel does not take: the messages are those of real kernels."""

import errno

from ingero.agent.capture.kernel.objects import find_next_step

# Linux 6.1.0-50-cloud-amd64, of a program with four calls within each other.
STACK = """libbpf: prog 'cxx_entry': -- BEGIN PROG LOAD LOG --
combined stack size of 4 calls is 544. Too large
processed 48364 insns (limit 1000000) max_states_per_insn 13 total_states 2135 peak_states 1682 mark_read 99
-- END PROG LOAD LOG --"""
FAILED = "libbpf: prog 'cxx_entry': failed to load: -13"


def test_what_the_verifier_says_is_said_and_nobody_is_sent_to_become_root():
    step = find_next_step(errno.EACCES, (STACK, FAILED))
    assert step.startswith(
        "this kernel's verifier does not take it: combined stack size of 4 calls is 544. Too large;"
    )
    assert "root" not in step


def test_without_privileges_or_without_a_log_root_is_the_next_step():
    for code, messages in ((errno.EPERM, (STACK,)), (errno.EPERM, ()), (errno.EACCES, (FAILED,))):
        assert find_next_step(code, messages) == "run as root, or grant CAP_BPF and CAP_PERFMON"


def test_of_other_errors_what_libbpf_said_is_shown():
    assert find_next_step(errno.EINVAL, (FAILED,)) == f"see `ingero check`; libbpf said: {FAILED}"
    assert find_next_step(errno.EINVAL, ()) == "see `ingero check`"
