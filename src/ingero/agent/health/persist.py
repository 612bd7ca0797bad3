"""The baseline on disk: read once at the start, written while warm and at the end.

The file's shape is the existing agent's, so either program continues from the other's file; the workload is a key of
ours, which others pass over. A file that cannot be
trusted is kept under another name, never overwritten in place; a newer one is left alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from ingero.agent.health.signals.baseline import BaselineSettings, SavedBaseline
from ingero.errors import StoreError
from ingero.units import NS_PER_S
from ingero.whole_files import replace_file
from ingero.wire.uds import format_timestamp

SCHEMA_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_CORRUPT_FILES: Final = 1000
ALPHA_TOLERANCE: Final = 1e-9

_KEYS: Final = ("Throughput", "Compute", "Memory", "CPU")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LoadOutcome(StrEnum):
    """What was found at the path, and so how the agent starts."""

    MISSING = "missing"
    FRESH = "fresh"
    STALE = "stale"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    NEWER_VERSION = "newer_version"


class Loaded(NamedTuple):
    """Result of a load.

    Attributes:
        outcome: What was found.
        baseline: Set only when fresh.
        detail: Why, for the log; empty when missing or fresh.
    """

    outcome: LoadOutcome
    baseline: SavedBaseline | None = None
    detail: str = ""


class _NewerError(ValueError):
    """The file was written by a later version."""


def load_baseline(
    path: Path, settings: BaselineSettings, *, wall_ns: int, stale_age_ns: int
) -> Loaded:
    """Read the file and deal with what cannot be used. Never raises for what is in the file.

    Args:
        path: Where the baseline is kept.
        settings: The averages in use; a file made with other ones is corrupt for us.
        wall_ns: Now.
        stale_age_ns: A file older than this, or from the future, is deleted.
    """
    try:
        with path.open("rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return Loaded(LoadOutcome.MISSING)
    except OSError as error:
        return Loaded(LoadOutcome.UNREADABLE, detail=str(error))
    try:
        saved_ns, baseline = decode_baseline(body, settings)
    except _NewerError as error:
        return Loaded(LoadOutcome.NEWER_VERSION, detail=str(error))
    except ValueError as error:
        return Loaded(LoadOutcome.CORRUPT, detail=f"{error}; {_set_aside(path, wall_ns)}")
    age_ns = wall_ns - saved_ns
    if not 0 <= age_ns <= stale_age_ns:
        with contextlib.suppress(OSError):
            path.unlink()
        return Loaded(LoadOutcome.STALE, detail=f"saved {age_ns / NS_PER_S:.0f} s ago")
    return Loaded(LoadOutcome.FRESH, baseline)


def save_baseline(
    path: Path, baseline: SavedBaseline, settings: BaselineSettings, *, wall_ns: int
) -> None:
    """Replace the file atomically; a reader sees the old one or the new one, also after a power cut.

    Raises:
        StoreError: The directory cannot be made or written.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(path, encode_baseline(baseline, settings, wall_ns=wall_ns))
    except OSError as error:
        raise StoreError(
            f"the baseline cannot be saved to {path}: {error.strerror or error}",
            hint="choose a writable file with --fleet-persist-path",
        ) from error


def encode_baseline(baseline: SavedBaseline, settings: BaselineSettings, *, wall_ns: int) -> bytes:
    """Write the document; averages raw, keys of the inner objects capitalised as the existing agent has them."""
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "saved_at": format_timestamp(wall_ns),
        "sample_count": baseline.n_samples,
        "fast_alpha": settings.fast_alpha,
        "floor_alpha": settings.floor_alpha,
        "fast_ema": dict(zip(_KEYS, baseline.fast, strict=True)),
        "hard_floor": dict(zip(_KEYS, baseline.floor, strict=True)),
    }
    if baseline.workload:
        document["workload"] = baseline.workload
    return json.dumps(document, indent=2, allow_nan=False).encode()


def decode_baseline(body: bytes, settings: BaselineSettings) -> tuple[int, SavedBaseline]:
    """Read the document.

    Returns:
        When it was saved, on the wall clock, and the averages.

    Raises:
        ValueError: It is not such a document; the message says why.
    """
    if len(body) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - bad data, not a bad call
    version = _integer(document, "schema_version")
    if version > SCHEMA_VERSION:
        raise _NewerError(f"schema_version {version} is newer than {SCHEMA_VERSION}")
    if version < 1:
        raise ValueError(f"schema_version {version}")
    n_samples = _integer(document, "sample_count")
    if n_samples < 0:
        raise ValueError("negative sample_count")
    for key, ours in (("fast_alpha", settings.fast_alpha), ("floor_alpha", settings.floor_alpha)):
        if abs(_number(document, key) - ours) > ALPHA_TOLERANCE:
            raise ValueError(f"{key} is not {ours:g}")
    saved_at = document.get("saved_at")
    if not isinstance(saved_at, str):
        raise ValueError("saved_at is not a time")  # noqa: TRY004
    fast, floor = (_averages(document, key) for key in ("fast_ema", "hard_floor"))
    workload = document.get("workload")
    name = workload if isinstance(workload, str) else ""
    return parse_time(saved_at), SavedBaseline(n_samples, fast, floor, name)


def parse_time(text: str) -> int:
    """Read an RFC 3339 time to the nanosecond.

    Raises:
        ValueError: It is none.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an RFC 3339 time")
    whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    return seconds * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


def _averages(document: Mapping[str, Any], key: str) -> tuple[float, ...]:
    inner = document.get(key)
    if not isinstance(inner, dict):
        raise ValueError(f"{key} is not an object")  # noqa: TRY004
    values = tuple(_number(inner, name) for name in _KEYS)
    if any(value < 0 for value in values):
        raise ValueError(f"{key} holds a negative value")
    return values


def _number(document: Mapping[str, Any], key: str) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is not a number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{key} is not finite") from error
    if not math.isfinite(number):
        raise ValueError(f"{key} is not finite")
    return number


def _integer(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is not a whole number")  # noqa: TRY004
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} in JSON")


def _set_aside(path: Path, wall_ns: int) -> str:
    seconds, rest = divmod(wall_ns, NS_PER_S)
    stamp = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y%m%dT%H%M%S") + f".{rest:09d}Z"
    name = path.with_name(f"{path.name}.corrupt-{stamp}")
    for n in range(MAX_CORRUPT_FILES):
        target = name if n == 0 else name.with_name(f"{name.name}.{n}")
        if target.exists():
            continue
        try:
            path.rename(target)
        except OSError as error:
            return f"it could not be set aside: {error}"
        return f"set aside as {target.name}"
    return "too many corrupt files beside it"
