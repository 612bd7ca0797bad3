"""The OpenAPI 3.1 document of the HTTP API, built from the questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ingero import __version__
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.service.access import OPEN_PATHS
from ingero.echo.service.formats import ARROW, NDJSON
from ingero.echo.service.replies import JSON
from ingero.echo.service.streaming import MAX_ROWS
from ingero.serving.query import Query

_SCHEMAS: Final = "#/components/schemas/"
_STRING: Final = {"type": "string"}
_ERROR: Final = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {"error": _STRING, "code": _STRING},
}
_ERROR_REF: Final = {"$ref": f"{_SCHEMAS}Error"}
_ERRORS: Final = {
    "400": "The arguments or the statement are wrong.",
    "401": "No bearer token, or a wrong one.",
    "403": "The bearer may not read that cluster, or may only write.",
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
_MAX_ROWS: Final = {
    "type": ["integer", "null"],
    "minimum": 1,
    "maximum": MAX_ROWS,
    "description": "Most rows of an answer in lines or as Arrow, instead of `limit`; JSON ignores it.",
}


def _object(*required: str, **properties: object) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_FIXED: Final = (
    ("/api/versions", "Versions and capabilities.", _object()),
    (
        "/api/v2/health",
        "Liveness; the version with a bearer.",
        _object("status", status=_STRING, version=_STRING),
    ),
    (
        "/api/v2/whoami",
        "What this bearer may do.",
        _object(
            *("bearer_id", "cluster_ids", "capabilities"),
            bearer_id=_STRING,
            cluster_ids={"type": "array", "items": _STRING},
            capabilities=_object(),
        ),
    ),
    ("/api/v2/tools/list", "Every tool with its schemas.", _object("tools")),
    ("/api/v2/openapi.json", "This document.", _object()),
)
"""Paths that take GET alone: what each answers, and its schema."""


def build_openapi(queries: Sequence[Query[Any, Any, Any]]) -> dict[str, Any]:
    """The document; nothing in it depends on who asks."""
    structs = [struct for query in queries for struct in (query.args, query.result)]
    schemas, components = msgspec.json.schema_components(structs, ref_template=_SCHEMAS + "{name}")
    paths: dict[str, Any] = {
        path: {"get": _get(path, description, schema)} for path, description, schema in _FIXED
    }
    for query, arguments, answer in zip(queries, schemas[::2], schemas[1::2], strict=True):
        fields = components[answer["$ref"].removeprefix(_SCHEMAS)]["properties"]
        paths[f"/api/v2/tools/{query.name}"] = {"post": _post(query, arguments, answer, fields)}
        if query.name == RUN_ANALYSIS.name:
            paths["/api/v2/sql"] = {"post": _post_sql(arguments, answer)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ingero Echo",
            "version": __version__,
            "description": "The site's memory: which node is slow, whom it blocks, what it costs.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **components},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _answers(schema: dict[str, Any]) -> dict[str, Any]:
    errors = {
        status: {"description": description, **_json(_ERROR_REF)}
        for status, description in _ERRORS.items()
    }
    return {"200": {"description": "The answer.", **_json(schema)}, **errors}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {JSON: {"schema": schema}}}


def _add_rows(answers: dict[str, Any], row: object) -> None:
    """The forms that ``Accept`` chooses beside JSON."""
    answers["200"]["content"] |= {
        NDJSON: {
            "schema": {
                "type": "string",
                "contentMediaType": NDJSON,
                "contentSchema": {"anyOf": [row, _ERROR_REF]},
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


def _get(path: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": description, "responses": _answers(schema)}
    if path in OPEN_PATHS:
        operation["security"] = [{}, {"bearer": []}]
    return operation


def _post(
    query: Query[Any, Any, Any],
    arguments: dict[str, Any],
    answer: dict[str, Any],
    fields: dict[str, Any],
) -> dict[str, Any]:
    properties: dict[str, Any] = {"args": arguments}
    if query.name != RUN_ANALYSIS.name:
        properties["max_rows"] = _MAX_ROWS
    body = _object("args", **properties) | {"additionalProperties": False}
    answers = _answers(_object("result", result=answer))
    _add_rows(answers, fields["rows"]["items"])
    return {
        "summary": query.title,
        "description": query.description,
        "operationId": query.name,
        "requestBody": {"required": True, **_json(body)},
        "responses": answers,
    }


def _post_sql(arguments: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    answers = _answers(answer)
    _add_rows(answers, {"type": "object"})
    return {
        "summary": "SQL on this bearer's own rows",
        "operationId": "sql",
        "requestBody": {"required": True, **_json(arguments)},
        "responses": answers,
    }
