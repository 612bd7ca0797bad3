"""The one setting for how calls are probed."""

import os

import pytest

from ingero.cli.options import PROBE_MODES
from ingero.config.environment import PROBE_MODE, ProbeMode, read_probe_mode, set_probe_mode
from ingero.errors import ConfigError


@pytest.mark.parametrize("mode", ProbeMode)
def test_the_environment_names_the_way(mode):
    assert read_probe_mode({PROBE_MODE: mode.value}) is mode


@pytest.mark.parametrize("environ", [{}, {PROBE_MODE: ""}])
def test_without_a_word_the_kernel_decides(environ):
    assert read_probe_mode(environ) is ProbeMode.AUTO


def test_a_way_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="kprobe") as caught:
        read_probe_mode({PROBE_MODE: "kprobe"})
    assert caught.value.hint == "session, pair, event, auto"


def test_what_is_set_holds_for_this_process_and_those_it_starts(monkeypatch):
    monkeypatch.setenv(PROBE_MODE, "auto")
    set_probe_mode(ProbeMode.PAIR)
    assert read_probe_mode() is ProbeMode.PAIR
    assert os.environ[PROBE_MODE] == "pair"


def test_the_option_takes_every_way_there_is():
    assert tuple(ProbeMode) == PROBE_MODES
