"""Commands that run until a signal end in order, and say by which."""

import signal

import pytest

from ingero.cli.signals import catch_stop


@pytest.mark.parametrize(
    ("sent", "first", "status"),
    [
        ([], 0, 0),
        ([signal.SIGTERM], signal.SIGTERM, 0),
        ([signal.SIGINT], signal.SIGINT, 130),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGTERM, 130),
    ],
)
def test_signals_are_noted_and_the_handlers_are_put_back(sent, first, status):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with catch_stop() as stop:
        for number in sent:
            signal.raise_signal(number)
        assert (stop(), stop.event.is_set()) == (bool(sent), bool(sent))
    assert (stop.first, stop.exit_status) == (first, status)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
