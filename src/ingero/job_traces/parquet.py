"""Parquet files of any name, opened by Arrow itself.

Arrow takes no name that is not UTF-8, so it opens the descriptor of a Python file. It must not read that file itself: a
thread of its pool would be the last to let go of it, and where that comes to pass while Python ends, the process ends
by SIGABRT or hangs (apache/arrow issues 34314 and 50482; one in seven short programs here).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def open_parquet(path: Path) -> Iterator[pa.NativeFile]:
    """A file to read.

    Raises:
        OSError: It cannot be opened.
    """
    import pyarrow as pa  # noqa: PLC0415 - 100 ms that only a reader should pay

    with path.open("rb") as file, pa.OSFile(f"/dev/fd/{file.fileno()}") as opened:
        yield opened


@contextmanager
def create_parquet(path: Path) -> Iterator[pa.NativeFile]:
    """A file to write; one that exists is replaced.

    Raises:
        OSError: It cannot be written.
    """
    import pyarrow as pa  # noqa: PLC0415

    with path.open("wb") as file, pa.OSFile(f"/dev/fd/{file.fileno()}", "wb") as opened:
        yield opened
