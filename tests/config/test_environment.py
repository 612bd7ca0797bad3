"""Switches that are environment variables."""

import pytest

from ingero.config.environment import (
    BEARER,
    DEFAULT_START_TIMEOUT_S,
    START_TIMEOUT,
    read_bearer,
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


@pytest.mark.parametrize(
    ("text", "token"),
    [("", ""), ("t0ken", "t0ken"), ("t0ken\n", "t0ken"), ("two words", "two words")],
)
def test_a_bearer_is_taken_without_the_line_end_of_its_file(text, token):
    assert read_bearer({BEARER: text}) == token
    assert read_bearer({}) == ""


@pytest.mark.parametrize("text", ["sécret", "two\nlines", "\n", " "])
def test_a_bearer_that_no_header_can_carry_is_refused_and_not_quoted(text):
    with pytest.raises(ConfigError, match=BEARER) as refused:
        read_bearer({BEARER: text})
    assert "cret" not in str(refused.value)
    assert "lines" not in str(refused.value)
