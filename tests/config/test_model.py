"""Settings models: strict about scalars, forgiving about nothing, and clear about everything at once."""

import json
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from ingero.config import Duration, Endpoint, Secret, Size, StrictModel, check_model, parse_model
from ingero.config.document import parse_document
from ingero.config.types import write_duration, write_size
from ingero.errors import ConfigError
from ingero.units import parse_duration, parse_size


class Mode(StrEnum):
    FAST = "fast"


class Inner(StrictModel):
    timeout: Duration = Field(parse_duration("5s"), description="How long.")
    limit: Size = Field(1024, description="How much.")
    names: tuple[str, ...] = Field((), description="Which.")


class Outer(StrictModel):
    endpoint: Endpoint = Field(Endpoint("localhost", 1), description="Where.")
    grpc: Inner | None = Field(None, description="Optional section.")
    many: dict[str, Inner] = Field(default_factory=dict, description="By name.")
    count: int = Field(1, ge=0, description="How many.")
    share: float = Field(0.5, description="How much of it.")
    is_on: bool = Field(default=False, description="Whether.")
    token: Secret | None = Field(None, description="A secret.")
    long_token: Secret | None = Field(None, min_length=20, description="A longer secret.")
    mode: Mode = Field(Mode.FAST, description="How.")
    text: str = Field("", description="Anything.")


def _say(settings):
    return [str(one) for one in check_model(Outer, settings)[1]]


def test_every_problem_is_listed_with_its_path_line_and_hint():
    document = parse_document(
        "grpc:\n  timout: 5s\n  limit: many\nmany:\n  a:\n    timeout: 5\ncount: -1\n", environ={}
    )
    _, problems = check_model(Outer, document.tree, at=("x",), lines={})
    assert {one.path for one in problems} == {
        "x.grpc.timout", "x.grpc.limit", "x.many.a.timeout", "x.count",
    }  # fmt: skip
    _, problems = check_model(Outer, document.tree, lines=document.lines)
    by_path = {one.path: one for one in problems}
    assert by_path["grpc.timout"].line == 2
    assert by_path["grpc.timout"].hint == "did you mean timeout?"
    assert by_path["many.a.timeout"].line == 6
    assert "write 5s" in by_path["many.a.timeout"].message


@pytest.mark.parametrize(
    "settings",
    [
        {"count": "1"}, {"count": 1.0}, {"count": True}, {"is_on": 1}, {"is_on": "true"},
        {"share": "0.5"}, {"text": 5}, {"mode": "slow"}, {"grpc": []}, {"grpc": {"names": "a"}},
    ],
)  # fmt: skip
def test_wrong_scalars_are_refused_not_converted(settings):
    assert len(_say(settings)) == 1


def test_key_without_a_value_means_its_defaults_and_an_absent_section_stays_absent():
    assert parse_model(Outer, {"grpc": None}).grpc == Inner()
    assert parse_model(Outer, {}).grpc is None
    assert parse_model(Outer, {"many": {"a": None}}).many == {"a": Inner()}
    assert parse_model(Outer, None) == Outer()


def test_lists_enums_and_integers_for_floats_are_read():
    model = parse_model(Outer, {"grpc": {"names": ["a"]}, "mode": "fast", "share": 1})
    assert model.grpc is not None
    assert model.grpc.names == ("a",)
    assert model.mode is Mode.FAST
    assert model.share == 1.0


def test_environment_is_a_number_for_numbers_and_text_for_text():
    tree = parse_document(
        "count: ${env:N}\ntext: ${env:N}\ntoken: ${env:N}\nis_on: ${env:B}\nshare: ${env:N}\n"
        "grpc:\n  timeout: ${env:D}\n",
        environ={"N": "12", "B": "true", "D": "3s"},
    ).tree
    model = parse_model(Outer, tree)
    assert (model.count, model.text, model.is_on, model.share) == (12, "12", True, 12.0)
    assert model.token is not None
    assert model.token.get_secret_value() == "12"
    assert model.grpc is not None
    assert model.grpc.timeout == 3_000_000_000


def test_secrets_do_not_print_in_models_dumps_or_problems():
    model = parse_model(Outer, {"token": "s3cret"})
    assert "s3cret" not in repr(model) + model.model_dump_json() + str(model)
    assert "31337" not in " ".join(_say({"token": 31337}))
    assert "s3cret" not in " ".join(_say({"long_token": "s3cret"}))


def test_number_where_text_is_wanted_says_to_quote_it():
    assert _say({"text": 5}) == ["text: should be text (write it in quotes)"]


def test_models_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Outer().count = 2  # type: ignore[misc]


@given(st.integers(min_value=0, max_value=10**18))
def test_durations_and_sizes_are_written_as_they_are_read(number):
    assert parse_size(write_size(number)) == number or number > 2**53
    if number < 2**53:
        assert parse_duration(write_duration(number)) == pytest.approx(number, abs=1)


def test_model_dump_can_be_read_again():
    model = parse_model(Outer, {"grpc": {"timeout": "1m30s", "limit": "64MiB"}, "endpoint": ":0"})
    dumped = json.loads(model.model_dump_json(exclude={"token"}))
    assert dumped["grpc"]["timeout"] == "1m30s"
    assert dumped["grpc"]["limit"] == "64MiB"
    assert parse_model(Outer, dumped) == model


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("0.0.0.0:4317", "0.0.0.0", 4317), (":80", "", 80), ("[::1]:0", "::1", 0),
        ("node-1.example:65535", "node-1.example", 65535),
    ],
)  # fmt: skip
def test_endpoints_are_read_and_written(text, host, port):
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port) == (host, port)
    assert str(endpoint) == text


@pytest.mark.parametrize("text", ["4317", "a:b", "a:65536", "http://a:1", "::1:80", "a b:1", ""])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="host:port"):
        Endpoint.parse(text)


def test_loopback_is_told_from_the_rest():
    assert [Endpoint.parse(f"{host}:1").is_loopback for host in ("127.0.0.9", "localhost", "[::1]")]
    assert not Endpoint.parse("0.0.0.0:1").is_loopback
    assert not Endpoint.parse(":1").is_loopback


def test_parse_model_raises_all_problems():
    with pytest.raises(ConfigError) as caught:
        parse_model(Outer, {"count": -1, "nope": 1})
    assert len(caught.value.problems) == 2
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("read", [parse_duration, parse_size])
def test_a_number_beyond_any_float_is_refused(read):
    with pytest.raises(ValueError, match="too large"):
        read("9" * 400 + ("h" if read is parse_duration else ""))


@pytest.mark.parametrize(
    ("key", "text"), [("timeout", "106752d"), ("limit", "8388608TiB"), ("timeout", "9" * 400 + "h")]
)
def test_what_no_counter_of_64_bits_holds_is_no_setting(key, text):
    (problem,) = _say({"grpc": {key: text}})
    assert problem.startswith(f"grpc.{key}: ")
