"""What ``config --defaults`` prints is what runs: a Fleet made from it can be found."""

from ingero.config.document import parse_document
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.defaults import write_defaults


def test_printed_receiver_listens_where_the_manual_says():
    protocols = parse_document(write_defaults(FACTORIES)).section("receivers", "otlp", "protocols")
    assert protocols["http"]["endpoint"] == "localhost:4318"
    assert protocols["grpc"]["endpoint"] == "localhost:4317"
