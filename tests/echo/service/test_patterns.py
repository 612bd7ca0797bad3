import msgspec
import pytest

from ingero.echo.queries.context import ClusterId, TimeWindow
from ingero.otlp.codec.structs import Hex


@pytest.mark.parametrize(
    ("kind", "good"),
    [(ClusterId, "train-1"), (TimeWindow, "1h30m"), (Hex, "00ff")],
)
def test_a_value_that_ends_in_a_line_feed_fits_no_pattern(kind, good):
    assert msgspec.convert(good, kind) == good
    for bad in (good + "\n", good + "\n\n", "\n" + good):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, kind)
