"""A platform connector of NVSentinel: what it is sent, and what becomes of its refusals.

It is a gRPC server whose messages are made of fields written down here once more, from NVSentinel's published protocol; a real NVSentinel is not to be had from Debian or PyPI.
"""

import re
from concurrent import futures
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import grpc
import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tests.remediation.site import Site, build_config
from tests.remediation.test_slurm import RECORD

from ingero.config.document import parse_document
from ingero.errors import PermanentError, RetryableError
from ingero.remediation.actuators.nvsentinel import ACTIONS, METHOD, STRATEGIES, NvsentinelActuator
from ingero.remediation.building import build_actuator
from ingero.remediation.config import ActuatorConfig, NvsentinelConfig, build_policy
from ingero.remediation.records import ActionState
from ingero.testing.clock import ManualClock

PROTO = """\
syntax = "proto3";
package datamodels;
import "google/protobuf/timestamp.proto";
enum Strategy { UNSPECIFIED = 0; EXECUTE_REMEDIATION = 1; STORE_ONLY = 2; }
enum Action { NONE = 0; COMPONENT_RESET = 2; CONTACT_SUPPORT = 5; RUN_FIELDDIAG = 6; RESTART_VM = 15; RESTART_BM = 24;
  REPLACE_VM = 25; RUN_DCGMEUD = 26; RESTART_APP = 39; UNKNOWN = 99; }
message Entity { string entityType = 1; string entityValue = 2; }
message HealthEvent { uint32 version = 1; string agent = 2; string componentClass = 3; string checkName = 4;
  bool isFatal = 5; bool isHealthy = 6; string message = 7; Action recommendedAction = 8; repeated string errorCode = 9;
  repeated Entity entitiesImpacted = 10; map<string, string> metadata = 11;
  google.protobuf.Timestamp generatedTimestamp = 12; string nodeName = 13; Strategy processingStrategy = 16; }
message HealthEvents { uint32 version = 1; repeated HealthEvent events = 2; }
"""
ON_NODE = replace(RECORD, target="n1", node_id="n1", kind="nvsentinel")


def parse_proto(text):
    """The file that such a text describes: messages of scalars, of each other and of a map, and enumerations."""
    file = FileDescriptorProto(
        name="sentinel_of_tests.proto", package="datamodels", syntax="proto3"
    )
    file.dependency.append("google/protobuf/timestamp.proto")
    for name, body in re.findall(r"enum (\w+) \{(.*?)\}", text, re.DOTALL):
        enum = file.enum_type.add(name=name)
        for value, number in re.findall(r"(\w+) = (\d+);", body):
            enum.value.add(name=value, number=int(number))
    enums = {one.name for one in file.enum_type}
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in re.findall(
            r"(repeated )?(map<string, string>|[\w.]+) (\w+) = (\d+);", body
        ):
            made = message.field.add(name=field, number=int(number))
            is_map = kind.startswith("map")
            made.label = made.LABEL_REPEATED if repeated or is_map else made.LABEL_OPTIONAL
            if is_map:
                entry = message.nested_type.add(name=f"{field.capitalize()}Entry")
                entry.options.map_entry = True
                for at, part in enumerate(("key", "value"), 1):
                    entry.field.add(
                        name=part, number=at, type=made.TYPE_STRING, label=made.LABEL_OPTIONAL
                    )
                made.type, made.type_name = made.TYPE_MESSAGE, f".datamodels.{name}.{entry.name}"
            elif kind in {"uint32", "bool", "string"}:
                made.type = getattr(made, f"TYPE_{kind.upper()}")
            else:
                made.type = made.TYPE_ENUM if kind in enums else made.TYPE_MESSAGE
                made.type_name = f".{kind}" if "." in kind else f".datamodels.{kind}"
    return file


@pytest.fixture(scope="module")
def protocol():
    """The classes of those messages, and the enumerations."""
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(parse_proto(PROTO))
    found = SimpleNamespace(
        HealthEvents=GetMessageClass(pool.FindMessageTypeByName("datamodels.HealthEvents"))
    )
    strategy = pool.FindEnumTypeByName("datamodels.Strategy")
    action = pool.FindEnumTypeByName("datamodels.Action")
    found.STRATEGY = {one.name: one.number for one in strategy.values}
    found.ACTION = {one.number: one.name for one in action.values}
    return found


class Connector:
    """What it received, and how it answers."""

    def __init__(self):
        self.events, self.bearers, self.code = [], [], None

    def take(self, request, context):
        self.bearers.append(dict(context.invocation_metadata()).get("authorization"))
        if self.code is not None:
            context.abort(self.code, "not now")
        self.events += request.events
        return b""


@pytest.fixture
def connector(protocol, tmp_path):
    taker = Connector()
    handler = grpc.unary_unary_rpc_method_handler(
        taker.take, request_deserializer=protocol.HealthEvents.FromString
    )
    service, name = METHOD.strip("/").split("/")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([
        grpc.method_handlers_generic_handler(service, {name: handler})
    ])
    taker.socket = tmp_path / "nvsentinel.sock"
    server.add_insecure_port(f"unix:{taker.socket}")
    server.start()
    yield taker
    server.stop(0).wait()


def connect(connector, **config):
    settings = NvsentinelConfig(socket=str(connector.socket), **config)
    return NvsentinelActuator(settings, ManualClock().wall_ns)


def test_an_event_to_be_stored_names_the_node_why_and_the_action(connector, protocol):
    connect(connector).apply(ON_NODE)
    (event,) = connector.events
    assert (event.nodeName, event.agent, event.checkName) == ("n1", "ingero", "IngeroCulprit")
    assert event.processingStrategy == protocol.STRATEGY["STORE_ONLY"]
    assert (event.isHealthy, event.isFatal) == (False, True)
    assert protocol.ACTION[event.recommendedAction] == "CONTACT_SUPPORT"
    assert event.message.startswith(f"ingero {RECORD.action_id} {RECORD.episode}: culprit")
    assert dict(event.metadata) == {
        "ingero.action": RECORD.action_id,
        "ingero.episode": RECORD.episode,
    }
    assert list(event.errorCode) == ["INGERO_CULPRIT"]
    assert event.generatedTimestamp.ToNanoseconds() == ManualClock().wall_ns()
    assert connector.bearers == [None]


def test_what_says_that_it_is_well_again_fits_what_said_that_it_is_not(connector):
    actuator = connect(connector, strategy="execute")
    actuator.apply(ON_NODE)
    actuator.reverse(ON_NODE)
    ill, well = connector.events
    assert (ill.isHealthy, well.isHealthy, well.isFatal) == (False, True, False)
    for part in (
        "nodeName",
        "checkName",
        "entitiesImpacted",
        "processingStrategy",
        "componentClass",
    ):
        assert getattr(ill, part) == getattr(well, part)
    assert well.processingStrategy == 1


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_actions_have_nvsentinels_numbers_and_none_is_not_fatal(connector, protocol, action):
    connect(connector, recommended_action=action).apply(ON_NODE)
    (event,) = connector.events
    assert protocol.ACTION[event.recommendedAction] == action
    assert event.isFatal is (action != "NONE")


def test_a_policy_may_name_each_action_that_has_a_number_and_no_other():
    field = NvsentinelConfig.model_fields["recommended_action"]
    assert set(get_args(field.annotation)) == set(ACTIONS)


def test_a_token_is_read_again_for_each_event(connector, tmp_path):
    token = tmp_path / "token"
    token.write_text("one\n")
    actuator = connect(connector, token_file=str(token))
    actuator.apply(ON_NODE)
    token.write_text("two")
    actuator.apply(ON_NODE)
    assert connector.bearers == ["Bearer one", "Bearer two"]
    token.unlink()
    with pytest.raises(RetryableError, match="No such file"):
        actuator.apply(ON_NODE)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, RetryableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RetryableError),
        (grpc.StatusCode.PERMISSION_DENIED, PermanentError),
        (grpc.StatusCode.UNAUTHENTICATED, PermanentError),
        (grpc.StatusCode.INVALID_ARGUMENT, PermanentError),
        (grpc.StatusCode.UNIMPLEMENTED, PermanentError),
    ],
)
def test_a_refusal_is_told_apart_from_what_may_pass(connector, code, kind):
    connector.code = code
    with pytest.raises(kind, match=f"{code.name}: not now"):
        connect(connector).apply(ON_NODE)


def test_a_connector_that_is_not_there_may_come(tmp_path):
    config = NvsentinelConfig(socket=str(tmp_path / "none"), timeout="5s")
    with pytest.raises(RetryableError, match="UNAVAILABLE"):
        NvsentinelActuator(config, ManualClock().wall_ns).apply(ON_NODE)


def test_a_remediator_sends_it_once_and_again_only_while_nobody_took_it(connector, tmp_path):
    site = Site(tmp_path / "journal.db", build_config())
    action = ActuatorConfig(nvsentinel=NvsentinelConfig(socket=str(connector.socket)))
    site.config = site.config.model_copy(update={"action": action})
    site.slurm = connect(connector, node_names={"n2": "gpu-2"})
    site.start()
    connector.code = grpc.StatusCode.UNAVAILABLE
    site.poll(4, ["n2"])
    assert site.states() == ["begun"]
    assert connector.events == []
    connector.code = None
    site.poll(6, ["n2"])
    assert site.states() == ["done"]
    assert [one.nodeName for one in connector.events] == ["gpu-2"]


def start_with(site, connector, strategy):
    """A process whose policy has this strategy."""
    config = NvsentinelConfig(socket=str(connector.socket), strategy=strategy)
    action = ActuatorConfig(nvsentinel=config)
    site.config = site.config.model_copy(update={"action": action})
    site.slurm = NvsentinelActuator(config, site.clock.wall_ns)
    site.start()


@pytest.mark.parametrize("first", ["execute", "store-only"])
def test_what_is_open_is_reversed_as_it_was_begun_whatever_the_policy_says_by_then(
    connector, tmp_path, first
):
    site = Site(tmp_path / "journal.db", build_config())
    start_with(site, connector, first)
    site.poll(6, ["n2"])
    assert site.states() == ["done"]
    start_with(site, connector, "store-only" if first == "execute" else "execute")
    (action,) = site.journal.actions()
    site.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
    site.poll(3, [])
    assert site.states() == ["undone"]
    ill, well = connector.events
    assert (ill.isHealthy, well.isHealthy) == (False, True)
    assert ill.processingStrategy == well.processingStrategy == STRATEGIES[first]


def test_what_may_have_been_done_under_another_strategy_is_reversed_and_not_sent_again(
    connector, tmp_path
):
    site = Site(tmp_path / "journal.db", build_config())
    start_with(site, connector, "execute")
    connector.code = grpc.StatusCode.UNAVAILABLE
    site.poll(4, ["n2"])
    assert site.states() == ["begun"]
    connector.code = None
    start_with(site, connector, "store-only")
    site.poll(6, ["n2"])
    assert [(one.isHealthy, one.processingStrategy) for one in connector.events] == [
        (True, STRATEGIES["execute"])
    ]
    assert site.states() == ["undone"]


def test_the_policy_chooses_it():
    policy = build_policy(parse_document("action: {nvsentinel: {strategy: execute}}\n"))
    assert build_actuator(policy, ManualClock()).kind == "nvsentinel"
