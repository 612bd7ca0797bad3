"""The answer to what is no message of MCP, the same on standard input and over HTTP. Importing this imports the SDK.

Source: JSON-RPC 2.0 §5: an invalid request is answered with -32600, text that is no JSON with -32700, under the id
where that can be read and under null elsewhere.
"""

from __future__ import annotations

import json

import mcp_types as types
from pydantic import ValidationError

from ingero.serving.request_ids import REFUSAL, has_unusable_id


def find_refusal(body: bytes) -> types.JSONRPCError | None:
    """The answer to a body that is no message; None to one that the SDK can answer."""
    try:
        message = types.jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError as error:
        return build_refusal(error)
    return check_id(message, body)


def check_id(message: types.JSONRPCMessage, text: str | bytes) -> types.JSONRPCError | None:
    """The answer to a request that the SDK took for a notification, for its id is none; None to any other message."""
    if isinstance(message, types.JSONRPCNotification) and has_unusable_id(text):
        refused = types.ErrorData(code=types.INVALID_REQUEST, message=REFUSAL)
        return types.JSONRPCError(jsonrpc="2.0", id=None, error=refused)
    return None


def build_refusal(error: Exception) -> types.JSONRPCError:
    """The answer to text of which the SDK says why it is no message, under its id where that can be read."""
    found = error.errors(include_url=False) if isinstance(error, ValidationError) else []
    refused = types.ErrorData(code=types.INVALID_REQUEST, message="this is no JSON-RPC message")
    messages: list[object] = [one["input"] for one in found if one["type"] == "missing"]
    if found and found[0]["type"] == "json_invalid":
        refused = types.ErrorData(code=types.PARSE_ERROR, message=found[0]["msg"])
        messages = [_read_loosely(found[0]["input"])]
    ids = (_find_id(message) for message in messages)
    request_id = next((one for one in ids if one is not None), None)
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=refused)


def _read_loosely(text: str | bytes) -> object:
    """What text says for a reader that takes half of a surrogate pair, which the SDK's does not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_id(message: object) -> int | str | None:
    """The id of a request that is no valid one; None where it has none that can be sent back."""
    found = message.get("id") if isinstance(message, dict) else None
    if isinstance(found, str):
        return found if found.encode(errors="replace").decode() == found else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None
