"""Parquet files as Arrow's threads read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def open_parquet(path: Path) -> Iterator[pa.NativeFile]:
    """A file of Arrow's own, of any name.

    Arrow takes no name that is not UTF-8, so it opens the descriptor of a Python file. It must not read that file
    itself: a thread of its pool would be the last to let go of it, and where that comes to pass while Python ends, the
    process ends by SIGABRT or hangs (apache/arrow issues 34314 and 50482; one in seven short programs here).

    Raises:
        OSError: It cannot be opened.
    """
    import pyarrow as pa  # noqa: PLC0415 - 100 ms that only a reader should pay

    with path.open("rb") as file, pa.OSFile(f"/dev/fd/{file.fileno()}") as opened:
        yield opened
