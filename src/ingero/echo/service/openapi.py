"""The OpenAPI 3.1 document of the HTTP API, built from the questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ingero import __version__
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.service.formats import ARROW, JSON, NDJSON
from ingero.echo.service.rows import MAX_ROWS
from ingero.serving.query import Query

_ERROR: Final = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
}
_FAULTS: Final = {
    "400": "The arguments or the statement are wrong.",
    "401": "No bearer token, or a wrong one.",
    "403": "The bearer may not read that cluster.",
    "404": "Nothing of that name.",
    "405": "Another method.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "Not JSON.",
    "429": "Too many requests, questions that wait, or wrong tokens.",
    "431": "The request's head is too large.",
    "500": "A defect of the server; its log has the reason under the request's id.",
    "503": "Draining, busy, or the store cannot answer.",
    "504": "The query was stopped at its deadline.",
}
_STRING: Final = {"type": "string"}
_MAX_ROWS: Final = {
    "type": ["integer", "null"],
    "minimum": 1,
    "maximum": MAX_ROWS,
    "description": "Most rows of an answer in lines or as Arrow, instead of `limit`; JSON ignores it.",
}


def build_openapi(queries: Sequence[Query[Any, Any, Any]]) -> dict[str, Any]:
    """The document; nothing in it depends on who asks."""
    paths = _build_fixed_paths()
    schemas: dict[str, Any] = {"Error": _ERROR}
    for query in queries:
        arguments = _lift(query.input_schema(), schemas)
        answer = _lift(query.output_schema(), schemas)
        paths[f"/api/v2/tools/{query.name}"] = {"post": _post(query, arguments, answer)}
    sql = {
        "post": _post_sql(
            _lift(RUN_ANALYSIS.input_schema(), schemas),
            _lift(RUN_ANALYSIS.output_schema(), schemas),
        )
    }
    paths["/api/v2/sql"] = sql
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ingero Echo",
            "version": __version__,
            "description": "The site's memory: which node is slow, whom it blocks, what it costs.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _build_fixed_paths() -> dict[str, Any]:
    return {
        "/api/versions": {
            "get": _get("Versions and capabilities.", {"type": "object"}, open_to_all=True)
        },
        "/api/v2/health": {
            "get": _get(
                "Liveness; the version with a bearer.",
                {
                    "type": "object",
                    "required": ["status"],
                    "properties": {"status": _STRING, "version": _STRING},
                },
                open_to_all=True,
            )
        },
        "/api/v2/whoami": {
            "get": _get(
                "What this bearer may do.",
                {
                    "type": "object",
                    "required": ["bearer_id", "cluster_ids", "capabilities"],
                    "properties": {
                        "bearer_id": _STRING,
                        "cluster_ids": {"type": "array", "items": _STRING},
                        "capabilities": {"type": "object"},
                    },
                },
            )
        },
        "/api/v2/tools/list": {
            "get": _get("Every tool with its schemas.", {"type": "object", "required": ["tools"]})
        },
        "/api/v2/openapi.json": {"get": _get("This document.", {"type": "object"})},
    }


def _lift(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Move a schema's definitions to the document's components."""
    definitions = schema.pop("$defs", {})
    for name, definition in definitions.items():
        schemas[name] = _relink(definition)
    lifted: dict[str, Any] = _relink(schema)
    return lifted


def _relink(value: Any) -> Any:  # noqa: ANN401 - JSON of any shape
    if isinstance(value, dict):
        return {
            key: item.replace("#/$defs/", "#/components/schemas/")
            if key == "$ref"
            else _relink(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_relink(item) for item in value]
    return value


def _answers(schema: dict[str, Any]) -> dict[str, Any]:
    faults = {
        status: {
            "description": says,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, says in _FAULTS.items()
    }
    return {
        "200": {"description": "The answer.", "content": {JSON: {"schema": schema}}},
        **faults,
    }


def _add_rows(answers: dict[str, Any], row: object) -> None:
    """The forms that ``Accept`` chooses beside JSON."""
    answers["200"]["content"] |= {
        NDJSON: {
            "schema": {
                "type": "string",
                "contentMediaType": NDJSON,
                "contentSchema": {"anyOf": [row, {"$ref": "#/components/schemas/Error"}]},
                "description": "A row a line. Where the answer breaks off, its last line is an error.",
            }
        },
        ARROW: {
            "schema": {
                "type": "string",
                "contentMediaType": ARROW,
                "description": "An Arrow IPC stream of the rows; the schema's metadata has the rest of the answer as "
                "JSON under `ingero.answer`. Where it breaks off, the last batch is empty and has `error` and "
                "`code` in its metadata, there is no end-of-stream marker, and the body is cut off.",
            }
        },
    }
    answers["200"]["headers"] = {
        "X-Ingero-Answer": {
            "description": "With rows alone: window, coverage and n_cut of the answer, as JSON.",
            "schema": {"type": "string", "contentMediaType": JSON},
        }
    }


def _get(says: str, schema: dict[str, Any], *, open_to_all: bool = False) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": says, "responses": _answers(schema)}
    if open_to_all:
        operation["security"] = [{}, {"bearer": []}]
    return operation


def _post(
    query: Query[Any, Any, Any], arguments: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    properties: dict[str, Any] = {"args": arguments}
    if query.name != RUN_ANALYSIS.name:
        properties["max_rows"] = _MAX_ROWS
    body = {
        "type": "object",
        "properties": properties,
        "required": ["args"],
        "additionalProperties": False,
    }
    result = {"type": "object", "required": ["result"], "properties": {"result": answer}}
    answers = _answers(result)
    _add_rows(answers, answer["properties"]["rows"]["items"])
    return {
        "summary": query.title,
        "description": query.says,
        "operationId": query.name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": answers,
    }


def _post_sql(arguments: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    answers = _answers(answer)
    _add_rows(answers, {"type": "object"})
    return {
        "summary": "SQL on this bearer's own rows",
        "operationId": "sql",
        "requestBody": {"required": True, "content": {"application/json": {"schema": arguments}}},
        "responses": answers,
    }
