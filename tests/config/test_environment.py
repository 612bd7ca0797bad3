"""Switches that are environment variables."""

import pytest

from ingero.config.environment import (
    DEFAULT_START_TIMEOUT_S,
    START_TIMEOUT,
    read_start_timeout,
)
from ingero.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "timeout_s"),
    [({}, DEFAULT_START_TIMEOUT_S), ({START_TIMEOUT: ""}, 180.0), ({START_TIMEOUT: "1200"}, 1200)],
)
def test_a_part_has_three_minutes_to_start_or_what_the_environment_says(environ, timeout_s):
    assert read_start_timeout(environ) == timeout_s


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "10s"])
def test_what_is_no_time_is_refused_with_the_name_of_the_variable(text):
    with pytest.raises(ConfigError, match=f"{START_TIMEOUT}='{text}'"):
        read_start_timeout({START_TIMEOUT: text})
