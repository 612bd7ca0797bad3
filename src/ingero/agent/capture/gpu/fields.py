"""NVML's field values: which ones are asked for, and what one of them says. Pure: nothing here calls NVML.

Source of numbers, units and scopes: nvml.h of the binding's version (13.6), the names ``NVML_FI_DEV_*``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

ALL_LINKS: Final = 0xFFFFFFFF
"""As the scope of a throughput counter: the sum over the links, not one of them."""

HELD: Final = {
    # nanoseconds; the first six are numbered as the policies of nvmlDeviceGetViolationStatus
    "power": 74,
    "thermal": 75,
    "sync_boost": 76,
    "board_limit": 77,
    "reliability": 79,
    "hw_thermal": 270,
    "power_brake": 271,
}
NVLINK_SENT_KIB: Final = 138
NVLINK_RECEIVED_KIB: Final = 139
PCIE_ERRORS: Final = {
    "correctable": 173,
    "nak_received": 174,
    "receiver": 175,
    "bad_tlp": 176,
    "nak_sent": 177,
    "bad_dllp": 178,
    "non_fatal": 179,
    "fatal": 180,
    "unsupported_request": 181,
    "lcrc": 182,
    "lane": 183,
}
NVLINK_ERRORS: Final = {
    # of NVLink 5, by link, where nvmlDeviceGetNvLinkErrorCounter is not supported
    "malformed_packet": 206,
    "buffer_overrun": 207,
    "receive": 208,
    "link_integrity": 211,
    "transmit_discard": 212,
    "link_recovery": 215,
}

_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of the union by ``nvmlValueType_t``."""

Field = tuple[int, int]
"""Number and scope."""


def decode_fields(answer: Iterable[Any] | None) -> dict[Field, int]:
    """What the driver answered, by number and scope; a field that it refused, or of a type not known here, is left out.

    Args:
        answer: The binding's ``c_nvmlFieldValue_t``; None when the whole call was refused.
    """
    return {
        (one.fieldId, one.scopeId): int(getattr(one.value, _MEMBERS[one.valueType]))
        for one in answer or ()
        if one.nvmlReturn == 0 and one.valueType < len(_MEMBERS)
    }


def find_kinds(answer: Mapping[Field, int], kinds: Mapping[str, int]) -> dict[str, int] | None:
    """Each kind's count, summed over its scopes; None when nothing of it was answered."""
    counts: dict[str, int] = {}
    for name, number in kinds.items():
        values = [value for (field, _), value in answer.items() if field == number]
        if values:
            counts[name] = sum(values)
    return counts or None
