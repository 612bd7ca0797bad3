"""Log lines that are limited: none of a subject's last words is lost, and no flood is written."""

import json
import logging

import pytest

from ingero.telemetry.limited import MAX_SUBJECTS, RateLimitedLog
from ingero.telemetry.log import ConsoleFormatter, JsonFormatter
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def said(self):
        return [(record.getMessage(), record.fields) for record in self.records]


@pytest.fixture
def kept():
    logger = logging.getLogger("test.limited")
    logger.setLevel(logging.DEBUG)
    logger.kept = Kept()
    logger.addHandler(logger.kept)
    yield logger
    logger.removeHandler(logger.kept)


def test_a_repeated_failure_is_one_line_a_minute_with_the_number_of_the_others(kept):
    clock = ManualClock()
    log = RateLimitedLog(kept, clock)
    for attempt in range(90):
        log.write("away", logging.WARNING, "destination away", attempt=attempt)
        clock.advance(NS_PER_S)
        log.flush()
    assert kept.kept.said == [
        ("destination away", {"attempt": 0}),
        ("destination away", {"attempt": 59, "suppressed": 58}),
    ]


def test_the_last_line_of_a_subject_that_flaps_is_written_in_the_end(kept):
    clock = ManualClock()
    log = RateLimitedLog(kept, clock, burst=2)
    for turn in range(10):
        log.write("quorum c", logging.INFO, ("quorum gained", "quorum lost")[turn % 2])
    assert [text for text, _ in kept.kept.said] == ["quorum gained", "quorum lost"]
    clock.advance(60 * NS_PER_S)
    log.flush()
    assert kept.kept.said[-1] == ("quorum lost", {"suppressed": 7})
    clock.advance(600 * NS_PER_S)
    log.flush()
    assert len(kept.kept.said) == 3


def test_ten_thousand_subjects_at_once_are_a_hundred_lines_and_then_one_a_second(kept):
    clock = ManualClock()
    log = RateLimitedLog(kept, clock)
    for node in range(10_000):
        log.write(node, logging.WARNING, "straggler", node=str(node))
    assert len(kept.kept.records) == 100
    for _ in range(5):
        clock.advance(NS_PER_S)
        log.flush()
    assert len(kept.kept.records) == 105
    assert log.n_dropped == 10_000 - 100 - MAX_SUBJECTS
    told = [
        fields
        for text, fields in kept.kept.said
        if text == "lines of too many subjects were left out"
    ]
    assert told == [{"lines": log.n_dropped}]  # once, before the rest


def test_two_subjects_do_not_limit_each_other(kept):
    log = RateLimitedLog(kept, ManualClock())
    assert log.write("a", logging.INFO, "away")
    assert not log.write("a", logging.INFO, "away")
    assert log.write("b", logging.INFO, "away")


def format_with(formatter, message="quorum gained", **fields):
    record = logging.LogRecord("l", logging.INFO, "f", 1, message, (), None)
    record.fields = fields
    return formatter.format(record)


def test_values_are_keys_of_the_json_line_and_cannot_replace_its_own():
    line = json.loads(format_with(JsonFormatter(), cluster="a b", nodes=6, level="forged"))
    assert (line["cluster"], line["nodes"], line["level"]) == ("a b", 6, "info")
    assert line["msg"] == "quorum gained"


def test_values_are_quoted_on_the_console_where_they_could_be_read_as_more_than_one():
    line = format_with(
        ConsoleFormatter(), a="x", b='q "r"', c="k=v", d=True, e=0.123456789, f="n\nl", g="", h=3
    )
    tail = line.split("quorum gained ", 1)[1]
    assert tail == r'a=x b="q \"r\"" c="k=v" d=true e=0.123457 f="n\nl" g="" h=3'
