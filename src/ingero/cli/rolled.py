"""A recording together with the files that were set aside from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ingero.cli.options import option
from ingero.cli.signals import unwind_on_end


def with_rolled() -> Any:  # noqa: ANN401 - as option
    """A field that asks for what was set aside, too."""
    return option(
        "Also read what `trace --db-rollover-size` set aside, as one recording.",
        "--include-rolled",
        default=False,
    )


@contextmanager
def open_with_rolled(path: Path, *, is_wanted: bool) -> Iterator[Path]:
    """The recording itself, or for the time of the context a merged copy with what was set aside from it.

    Args:
        path: The recording.
        is_wanted: Whether what was set aside is wanted.

    Raises:
        StoreError: A file cannot be read, or there is no room for the copy.
    """
    from ingero.recording.export.merge import merge_recordings
    from ingero.recording.store.rollover import list_aside

    aside = list_aside(path) if is_wanted else []
    if not aside:
        yield path
        return
    with unwind_on_end(), TemporaryDirectory(prefix="ingero-rolled-") as folder:
        whole = Path(folder) / path.name
        merge_recordings([*aside, path], whole)
        yield whole
