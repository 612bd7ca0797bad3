"""``docs/specs/component.md`` as code, over every component there is."""

import asyncio
import contextlib
import json
import re
import socket
import threading

import pytest

from ingero.config import parse_model
from ingero.config.describe import iter_keys
from ingero.config.document import parse_document
from ingero.errors import ConfigError, DeliveryError, IngeroError, PermanentError, RetryableError
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.component import (
    ComponentId,
    ComponentKind,
)
from ingero.fleet.config import build_config
from ingero.fleet.consumer import Batch
from ingero.fleet.service import FleetService
from ingero.fleet.views import (
    ServiceStatus,
    ServiceView,
)
from ingero.otlp.codec import decode_export
from ingero.otlp.names import Signal
from ingero.telemetry.declare import MetricKind
from ingero.testing.host import KeptBatches, ManualHost

NAMES = [f"{factory.kind.value}-{factory.type}" for factory in FACTORIES]
CONSUMING = [
    factory
    for factory in FACTORIES
    if factory.kind in {ComponentKind.PROCESSOR, ComponentKind.EXPORTER}
]
PROCESSORS = [factory for factory in FACTORIES if factory.kind is ComponentKind.PROCESSOR]
BODIES = {
    Signal.METRICS: {"resourceMetrics": [{"scopeMetrics": [{"metrics": [
        {"name": "m", "gauge": {"dataPoints": [{"timeUnixNano": "1", "asDouble": 1}]}}]}]}]},
    Signal.LOGS: {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": {"stringValue": "x"}}]}]}]},
    Signal.TRACES: {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "s"}]}]}]},
}  # fmt: skip

each = pytest.mark.parametrize("factory", FACTORIES, ids=NAMES)
each_processor = pytest.mark.parametrize(
    "factory", PROCESSORS, ids=[one.type for one in PROCESSORS]
)
each_consuming = pytest.mark.parametrize(
    "factory", CONSUMING, ids=[f"{one.kind.value}-{one.type}" for one in CONSUMING]
)


class Refusing:
    """Refuses until told otherwise, then keeps."""

    def __init__(self, error):
        self.error = error
        self.batches = []

    def consume(self, batch):
        if self.error is not None:
            raise self.error
        self.batches.append(batch)


def _host():
    host = ManualHost()
    host.offer(ServiceView, FleetService(lambda: pytest.fail("not asked for"), FACTORIES))
    return host


def _settings(factory, tmp_path=None):
    """Defaults and example, with every endpoint on a port of the kernel's choosing and files in ``tmp_path``."""
    model = parse_model(
        factory.config,
        parse_document(json.dumps(dict(factory.example)), environ={"INGERO_TOKEN": "t"}).tree,
    )
    settings = _dump(model)
    if (
        "retry_on_failure" in settings
    ):  # nobody listens, and stopping tries until the service's deadline
        settings["retry_on_failure"]["enabled"] = False
    text = json.dumps(settings)
    text = re.sub(r'"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::\]|):\d+"', '"127.0.0.1:0"', text)
    text = text.replace("http://localhost:4318", "http://127.0.0.1:9")
    if tmp_path is not None:
        text = text.replace("/var/lib/ingero-fleet", str(tmp_path))
    return parse_model(factory.config, _drop_nulls(json.loads(text)))


def _dump(model):
    """As JSON with secrets readable, so that they can be read again."""
    from pydantic import SecretStr

    def reveal(value):
        if isinstance(value, SecretStr):
            return value.get_secret_value()
        if isinstance(value, dict):
            return {key: reveal(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [reveal(item) for item in value]
        return value

    plain, secret = model.model_dump(mode="json"), reveal(model.model_dump())

    def merge(left, right):
        if isinstance(left, dict):
            return {key: merge(item, right[key]) for key, item in left.items()}
        if isinstance(left, list):
            return [merge(item, other) for item, other in zip(left, right, strict=True)]
        return right if left == "**********" else left

    return merge(plain, secret)


def _drop_nulls(value):
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return value


def _build(factory, settings, following=None, signal=None):
    component = ComponentId(factory.type)
    if factory.kind is ComponentKind.RECEIVER:
        outputs = {signal: following or KeptBatches() for signal in factory.signals}
        return factory.create(component, settings, outputs)
    if factory.kind is ComponentKind.PROCESSOR:
        following = following or KeptBatches()
        return factory.create(component, settings, signal or min(factory.signals), following)
    return factory.create(component, settings)


def _batch(signal):
    body = json.dumps(BODIES[signal]).encode()
    return Batch(signal, decode_export(body, signal, "application/json"), 1)


@each
def test_c1_c2_factory_is_unique_and_says_what_it_is(factory):
    assert [(one.kind, one.type) for one in FACTORIES].count((factory.kind, factory.type)) == 1
    assert re.fullmatch(r"[a-z][a-z0-9_]*", factory.type)
    assert factory.description.endswith(".")
    assert len(factory.description) <= 120
    assert factory.signals


@each
def test_c3_every_key_has_a_description(factory):
    assert [key.path for key in iter_keys(factory.config) if not key.description] == []


@each
def test_c4_c6_defaults_are_valid_and_can_be_written_and_read_back(factory, tmp_path):
    settings = _settings(factory, tmp_path)
    assert parse_model(factory.config, _drop_nulls(_dump(settings))) == settings


@each
def test_c5_unknown_key_is_refused_with_its_line_and_the_nearest(factory):
    known = next(iter(factory.config.model_fields))
    text = f"{factory.kind.value}:\n  {factory.type}:\n    {known}x: 1\nservice: {{}}\n"
    with pytest.raises(ConfigError) as caught:
        build_config(parse_document(text, environ={}), FACTORIES)
    path = f"{factory.kind.value}.{factory.type}.{known}x"
    (problem,) = [one for one in caught.value.problems if one.path == path]
    assert problem.line == 3
    assert "did you mean" in problem.hint


@each
def test_c7_secrets_are_not_printed(factory, tmp_path):
    settings = _settings(factory, tmp_path)
    secrets = re.findall(r"SecretStr\('([^*][^']*)'\)", repr(settings))
    assert secrets == []


@each
def test_c9_building_opens_nothing(factory, tmp_path):
    settings = _settings(factory, tmp_path)
    threads = set(threading.enumerate())
    _build(factory, settings)
    assert set(threading.enumerate()) == threads
    assert list(tmp_path.iterdir()) == []


@each
def test_c10_c11_stop_may_come_at_any_time_and_releases_everything(factory, tmp_path):
    settings = _settings(factory, tmp_path)

    async def scenario():
        host = _host()
        host.draining = True
        await _build(factory, settings).stop()
        for _ in range(2):
            component = _build(factory, settings)
            await component.start(host)
            await component.stop()
            await component.stop()

    asyncio.run(scenario())


LISTENING = [one for one in FACTORIES if "host:port" in {key.form for key in iter_keys(one.config)}]


@pytest.mark.parametrize("factory", LISTENING, ids=[one.type for one in LISTENING])
def test_c12_c14_listeners_announce_and_name_a_port_that_is_taken(factory, tmp_path):
    settings = _settings(factory, tmp_path)

    async def announced():
        host = _host()
        component = _build(factory, settings)
        await component.start(host)
        await component.stop()
        return host.announced

    found = asyncio.run(announced())
    assert found
    assert all(endpoint.port > 0 for endpoint in found.values())

    async def clash(port):
        text = json.dumps(_dump(settings)).replace("127.0.0.1:0", f"127.0.0.1:{port}")
        component = _build(factory, parse_model(factory.config, _drop_nulls(json.loads(text))))
        try:
            await component.start(_host())
        finally:
            await component.stop()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(IngeroError, match=rf"127\.0\.0\.1:{port}"):
            asyncio.run(clash(port))


@each_consuming
def test_c15_every_signal_it_takes_is_taken_or_refused_as_agreed(factory, tmp_path):
    settings = _settings(factory, tmp_path)

    async def offer(signal):
        host = _host()
        component = _build(factory, settings, signal=signal)
        await component.start(host)
        try:
            component.consume(_batch(signal))
        except DeliveryError as refusal:
            return type(refusal)
        else:
            return "taken"
        finally:
            host.draining = True
            await component.stop()

    outcomes = {signal: asyncio.run(offer(signal)) for signal in sorted(factory.signals)}
    assert set(outcomes.values()) == {"taken"}, outcomes


@each_processor
@pytest.mark.parametrize("kind", [RetryableError, PermanentError])
def test_c16_refusal_of_what_follows_is_passed_on_or_the_data_kept(factory, kind, tmp_path):
    settings = _settings(factory, tmp_path)

    async def scenario():
        following = Refusing(kind("no"))
        component = _build(factory, settings, following)
        await component.start(_host())
        refusals = []
        try:
            component.consume(_batch(min(factory.signals)))
        except DeliveryError as refusal:
            refusals.append(type(refusal))
        following.error = None
        await component.stop()
        return refusals, following.batches

    refusals, kept = asyncio.run(scenario())
    assert refusals == [kind] or kept


@each
def test_c20_c21_instruments_are_declared_and_no_others_are_made(factory, tmp_path):
    settings = _settings(factory, tmp_path)

    async def scenario():
        host = _host()
        component = _build(factory, settings)
        await component.start(host)
        if factory.kind in {ComponentKind.PROCESSOR, ComponentKind.EXPORTER}:
            with contextlib.suppress(DeliveryError):
                component.consume(_batch(min(factory.signals)))
        host.draining = True
        await component.stop()
        return {instrument.metric for instrument in host.meter}

    made = asyncio.run(scenario())
    assert made <= set(factory.metrics), {one.name for one in made - set(factory.metrics)}
    never_made = {one.name for one in set(factory.metrics) - made}
    assert not never_made, f"declared and never made: {never_made}"
    for metric in factory.metrics:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
        assert metric.description.endswith(".")


def test_one_name_is_declared_one_way_by_all():
    declared = {}
    for factory in FACTORIES:
        for metric in factory.metrics:
            assert declared.setdefault(metric.name, metric) == metric


def test_service_that_has_not_started_says_so():
    service = FleetService(lambda: pytest.fail("not asked for"), FACTORIES)
    assert service.status is ServiceStatus.STARTING
    assert service.pipelines() == ()
