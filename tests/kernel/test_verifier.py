"""The programs for library functions are far from the million instructions at which the verifier stops.

Another kernel, or another compiler, may need several times as many for the same program, and a user waits for them.
"""

import re
from pathlib import Path

import pytest

from ingero.agent.capture.probes.modes import load_calls, load_cxx
from ingero.config.environment import ProbeMode

pytestmark = pytest.mark.kernel

MOST = 150_000


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_the_verifier_goes_through_few_instructions_of_each_program(mode):
    _, calls, _ = load_calls(mode, {})
    with calls, load_cxx(mode, calls.maps) as cxx:
        programs = calls.programs | cxx.programs
        texts = {name: Path(f"/proc/self/fdinfo/{fd}").read_text() for name, fd in programs.items()}
    verified = {
        name: int(re.search(r"^verified_insns:\s+(\d+)$", text, re.MULTILINE)[1])
        for name, text in texts.items()
    }
    assert len(verified) >= 3
    assert max(verified.values()) < MOST, verified
