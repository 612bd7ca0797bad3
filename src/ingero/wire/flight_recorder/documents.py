"""Opens one dump: a pickle or a JSON document of plain values.

A pickle can name any callable; these dumps need none. The unpickler admits no class at all, so a dump that asks for one
is refused before anything is imported. What is read is bounded by the file's size, which is bounded too; `pickles` sees
to it that a pickle stands for no more.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from typing_extensions import override

from ingero.errors import BadDataError
from ingero.wire.flight_recorder.pickles import check_pickle

MAX_DUMP_BYTES: Final = 256 * 1024 * 1024


class _NoClasses(pickle.Unpickler):  # noqa: S301 - admits no class, so nothing of the file can run
    """An unpickler of plain values only."""

    @override
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise BadDataError(
            f"the dump asks for {module}.{name}; a Flight Recorder dump holds plain values only"
        )

    @override
    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise BadDataError(
            "the dump refers to data outside itself; a Flight Recorder dump does not"
        )


def read_file(path: Path) -> bytes:
    """The whole file.

    Raises:
        BadDataError: Unreadable, or larger than any dump; the message names the file.
    """
    try:
        if path.stat().st_size > MAX_DUMP_BYTES:
            raise BadDataError(f"{path}: larger than {MAX_DUMP_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise BadDataError(f"{path}: {error.strerror}") from error


def _load_pickle(body: bytes) -> object:
    check_pickle(body)
    return _NoClasses(io.BytesIO(body)).load()


def decode_document(body: bytes) -> Mapping[str, Any]:
    """The mapping that a dump holds, whatever it is written as.

    Raises:
        BadDataError: No dump, truncated or hostile.
    """
    try:
        dump = json.loads(body) if body[:1] == b"{" else _load_pickle(body)
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise BadDataError(
            "neither a whole pickle nor a whole JSON document: no dump, cut short, or still being written"
        ) from error
    # The JSON of a rank that recorded nothing has no entries (FlightRecorderDetail.hpp, dump_json, PyTorch 2.13).
    if not isinstance(dump, dict) or "pg_config" not in dump:
        raise BadDataError("not a Flight Recorder dump: it has no pg_config and entries")
    if "entries" not in dump and "version" not in dump:
        raise BadDataError("not a Flight Recorder dump: it has no pg_config and entries")
    return dump
