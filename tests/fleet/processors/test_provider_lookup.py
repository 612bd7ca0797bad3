"""``provider_lookup``: the operator's mapping names the provider, whatever the agent said and however it was sent."""

import asyncio
import itertools

import pytest

from ingero.config import parse_model
from ingero.errors import ConfigError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.provider_lookup import FACTORY, ProviderLookupConfig
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
    encode_protobuf,
    iter_points,
)
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_S

RULES = [
    {"provider": "coreweave", "nodes": ["cw-*"]},
    {"provider": "gcp", "addresses": ["10.20.0.0/16", "fd00::/8"]},
    {"provider": "azure", "labels": {"pool": "a100", "zone": "2"}},
]


def export(form, **resource):
    built = build_metrics(resource, [build_gauge("m", [build_number(1.0, 1)])], "t")
    if form == "json":
        return built
    return decode_export(encode_protobuf(built), Signal.METRICS, "application/x-protobuf")


def run(settings, *exports, between=None):
    """The provider of each export's resource after the processor; None when it has none."""
    host, kept = ManualHost(), KeptBatches()

    async def scenario():
        config = parse_model(ProviderLookupConfig, settings)
        processor = FACTORY.create(ComponentId("provider_lookup"), config, Signal.METRICS, kept)
        await processor.start(host)
        for one in exports:
            processor.consume(Batch(Signal.METRICS, one, 1))
            if between is not None:
                between()
                host.advance(30 * NS_PER_S)
        await processor.stop()

    asyncio.run(scenario())
    return host, [next(iter_points(b.export)).resource.get("ingero.provider") for b in kept.batches]


@pytest.mark.parametrize("form", ["json", "protobuf"])
@pytest.mark.parametrize(
    ("resource", "provider"),
    [
        ({"ingero.node.id": "cw-7"}, "coreweave"),
        ({"ingero.node.id": "n1", "host.ip": "10.20.3.4"}, "gcp"),
        ({"ingero.node.id": "n1", "host.ip": ["192.168.0.1", "fd00::1"]}, "gcp"),
        ({"ingero.node.id": "n1", "k8s.node.label.pool": "a100", "k8s.node.label.zone": "2"}, "azure"),
        ({"ingero.node.id": "n1", "k8s.node.label.pool": "a100"}, None),
        ({"ingero.node.id": "n1", "host.ip": "not an address"}, None),
        ({"ingero.node.id": "cw-7", "ingero.provider": "aws"}, "coreweave"),
        ({"ingero.node.id": "n1", "ingero.provider": "lambda"}, "lambda"),
        ({"ingero.node.id": "n1", "ingero.provider": "ec2"}, "aws"),
    ],
)  # fmt: skip
def test_first_rule_that_fits_wins_over_the_agent_and_aliases_become_one(form, resource, provider):
    _, (first, again) = run({"rules": RULES}, export(form, **resource), export(form, **resource))
    assert first == again == provider


@pytest.mark.parametrize("form", ["json", "protobuf"])
def test_what_the_receiver_holds_is_not_changed(form):
    given = export(form, **{"ingero.node.id": "cw-7", "ingero.provider": "aws"})
    run({"rules": RULES}, given)
    assert next(iter_points(given)).resource["ingero.provider"] == "aws"


def test_a_resource_without_attributes_gets_no_provider_of_another():
    named = export("json", **{"ingero.node.id": "cw-7"})
    _, providers = run({"rules": RULES}, named, export("protobuf"), named, export("json"))
    assert providers == ["coreweave", None, "coreweave", None]


def test_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path):
    path = tmp_path / "node_providers.yaml"
    path.write_text("rules: [{provider: gcp, nodes: ['*']}]")
    edits = iter([
        "rules: [{provider: azure, nodes: ['*']}]",
        "rules: [{provider: aws, node: ['*']}]",
        "rules: [{provider: lambda, nodes: ['*']}]",
    ])
    one = export("protobuf", **{"ingero.node.id": "n1"})
    host, providers = run(
        {"mapping_file": str(path)}, one, one, one, one,
        between=lambda: [path.write_text(edit) for edit in itertools.islice(edits, 1)],
    )  # fmt: skip
    assert providers == ["gcp", "azure", "azure", "lambda"]
    name = "ingero_fleet_provider_reloads_total"
    assert host.read(name, processor="provider_lookup", result="applied") == 2
    assert host.read(name, processor="provider_lookup", result="refused") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules:\n- provider: aws\n  nods: [a]\n", "line 3.*nodes"),
        ("rules:\n- provider: aws\n", "fits every node"),
        ("rules:\n- provider: aws\n  addresses: [10.0.0.0/99]\n", "10.0.0.0/99"),
    ],
)
def test_bad_mapping_stops_the_start_and_says_where(tmp_path, text, said):
    path = tmp_path / "node_providers.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run({"mapping_file": str(path)})


def test_rules_and_a_file_together_or_neither_are_refused():
    for settings in ({}, {"rules": RULES, "mapping_file": "x"}):
        with pytest.raises(ConfigError, match="either rules or mapping_file"):
            run(settings)
