"""Requests of JSON-RPC whose id MCP does not allow, which its SDK takes for notifications and answers to nobody.

Source: Model Context Protocol 2026-07-28, "Requests": the id is a text or an integer. JSON-RPC 2.0 §4 and §5: a request
that is no valid one is answered under the id null.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

REFUSAL: Final = "the id of a request is a text or a whole number"
_WHOLE: Final = re.compile(rb"-?\d+")


class _Envelope(msgspec.Struct):
    """What says whether a message is a request; the rest is not built."""

    method: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


def has_unusable_id(message: str | bytes) -> bool:
    """Whether a message is a request with an id such as 1.5 or true; null is no id, and the message a notification."""
    try:
        found = msgspec.json.decode(message, type=_Envelope)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False  # the SDK says what is wrong with it
    given = bytes(found.id)
    if not bytes(found.method) or given in {b"", b"null"}:
        return False
    return not given.startswith(b'"') and _WHOLE.fullmatch(given) is None
