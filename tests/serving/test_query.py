from typing import Annotated

import jsonschema
import msgspec
import pytest

from ingero.errors import BadDataError
from ingero.serving.query import AnswerError, ArgumentError, Query, build_schema, get_query


class Args(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{1,16}$")]
    limit: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5


class Row(msgspec.Struct):
    node: str
    score: float | None


class Result(msgspec.Struct):
    rows: list[Row]


def answer(context: dict[str, float], args: Args) -> Result:
    if args.node not in context:
        raise BadDataError(f"no node {args.node!r}")
    return Result([Row(args.node, context[args.node])] * args.limit)


QUERY = Query("fleet.node.score", "Score", "The score of a node.", Args, Result, answer)


def test_bytes_and_decoded_arguments_get_the_same_answer():
    from_bytes = QUERY.ask({"n1": 0.5}, b'{"node":"n1","limit":2}')
    from_mapping = QUERY.ask({"n1": 0.5}, {"node": "n1", "limit": 2})
    assert from_bytes == from_mapping
    assert msgspec.json.decode(from_bytes) == {"rows": [{"node": "n1", "score": 0.5}] * 2}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"node": "n1", "limit": 99}, "limit"),
        ({"node": "N1"}, "node"),
        ({}, "node"),
        ({"node": "n1", "nodes": 1}, "nodes"),
        (b"{", "truncated"),
        (b"[]", "object"),
    ],
)
def test_arguments_off_the_schema_are_refused_with_the_field(arguments, names):
    with pytest.raises(ArgumentError, match=names):
        QUERY.ask({"n1": 0.5}, arguments)


def test_schemas_have_an_object_at_the_root_and_accept_what_the_code_accepts():
    schema = QUERY.input_schema()
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    jsonschema.validate({"node": "n1", "limit": 2}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"node": "n1", "limit": 99}, schema)
    output = QUERY.output_schema()
    jsonschema.validate(msgspec.json.decode(QUERY.ask({"n1": 0.5}, {"node": "n1"})), output)
    assert list(output["$defs"]) == ["Row"]


def test_not_a_number_is_encoded_as_absent():
    answered = msgspec.json.decode(QUERY.ask({"n1": float("nan")}, {"node": "n1", "limit": 1}))
    assert answered == {"rows": [{"node": "n1", "score": None}]}


def test_an_answer_that_breaks_its_schema_is_our_error_and_not_sent():
    class Bounded(msgspec.Struct):
        share: Annotated[float, msgspec.Meta(le=1.0)]

    bad = Query("a.share", "S", "S", Args, Bounded, lambda context, args: Bounded(3.0))
    with pytest.raises(AnswerError, match="share"):
        bad.ask({}, {"node": "n1"})


def test_a_name_off_the_grammar_or_open_arguments_are_refused_at_definition():
    with pytest.raises(ValueError, match="no name"):
        Query("Fleet", "S", "S", Args, Result, answer)

    class Open(msgspec.Struct):
        node: str

    with pytest.raises(ValueError, match="forbid unknown"):
        Query("fleet.x", "S", "S", Open, Result, answer)


def test_lookup_by_name():
    assert get_query((QUERY,), "fleet.node.score") is QUERY
    with pytest.raises(KeyError):
        get_query((QUERY,), "fleet.node")
    assert build_schema(Row)["properties"]["score"]["anyOf"]
