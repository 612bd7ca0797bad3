"""Reading traces of training jobs from files; one ships with the package for the demo and the tests."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ingero.errors import BadDataError
from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import JobTrace, TraceRows
from ingero.job_traces.operations import COLUMNS, build_operations_trace, is_operations
from ingero.job_traces.parquet import open_parquet

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_MAGIC: Final = b"PAR1"
_REQUIRED: Final = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")


PACKAGED: Final = ("AR",)
"""Names of the traces under ``job_traces/data``; each has a PROVENANCE.md beside it."""


def find_packaged(name: str) -> Path | None:
    """Where a trace that ships with the package lies, or None when there is none of that name."""
    if name not in PACKAGED:
        return None
    return Path(str(resources.files("ingero.job_traces"))) / "data" / name / f"trace-{name}.parquet"


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa  # noqa: PLC0415 - 100 ms that only a reader should pay

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise BadDataError(
            f"{path}: cannot be read as Parquet: {error}",
            hint="the file may be cut short; compare its size with the original",
        ) from error


def read_straggler_rows(path: Path) -> TraceRows:
    """Read the rows of a StragglerAnalysis recording; other columns than the required six are not needed.

    Raises:
        BadDataError: Not Parquet, cut short, columns missing or of the wrong type, or no rows.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    with _parquet_errors(path), open_parquet(path) as file:
        names = pq.read_schema(file).names
        missing = [name for name in _REQUIRED if name not in names]
        if missing:
            raise BadDataError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(names[:20])}",
                hint="a trace has the columns that docs/specs/trace-format.md lists",
            )
        table = pq.read_table(file, columns=list(_REQUIRED))
        table = table.drop_null()
        if not table.num_rows:
            raise BadDataError(f"{path}: no rows")
        optype = table["optype"].combine_chunks()
        if not pa.types.is_dictionary(optype.type):
            optype = optype.cast(pa.string()).dictionary_encode()
        columns = {
            name: table[name].cast(pa.float64()).to_numpy()
            for name in _REQUIRED
            if name != "optype"
        }
        if isinstance(optype, pa.ChunkedArray):
            optype = optype.unify_dictionaries().combine_chunks()
    return TraceRows(
        dp=columns["dp_rank"].astype(np.int64),
        stage=columns["stage"].astype(np.int64),
        step=columns["step"].astype(np.int64),
        optype=optype.indices.to_numpy().astype(np.int64),
        start_s=columns["start_ts"],
        duration_s=columns["duration"],
        optypes=tuple(str(name) for name in optype.dictionary.to_pylist()),
    )


def _read_operations(path: Path) -> pa.Table | None:
    """The rows of a file of operations; None for another one."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with _parquet_errors(path), open_parquet(path) as file:
        names = pq.read_schema(file).names
        if not is_operations(names):
            return None
        return pq.read_table(file, columns=[name for name in names if name in COLUMNS])


def _find_gpus_per_worker(path: Path) -> int:
    """Tensor-parallel size from ``meta-NAME.yaml`` beside ``trace-NAME.parquet``; 1 when it does not say."""
    meta = path.with_name(path.name.replace("trace-", "meta-", 1)).with_suffix(".yaml")
    if not meta.is_file():
        return 1
    found = re.search(r"^tp_size:\s*(\d+)\s*$", meta.read_text(errors="replace"), re.MULTILINE)
    return max(int(found[1]), 1) if found else 1


def read_trace(path: Path) -> JobTrace:
    """Read a trace of a training job: StragglerAnalysis Parquet, or operations that `ingero up --record` wrote.

    Raises:
        BadDataError: The file is missing, empty, cut short or of no known format.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(len(_MAGIC))
    except OSError as error:
        raise BadDataError(f"{path}: {error.strerror or error}") from error
    if head != _MAGIC:
        raise BadDataError(
            f"{path}: not a trace of a known format (Parquet, as docs/specs/trace-format.md says)"
        )
    # It becomes the cluster's, which is sent as UTF-8.
    name = os.fsencode(path.stem.removeprefix("trace-")).decode(errors="backslashreplace")
    operations = _read_operations(path)
    if operations is not None:
        return build_operations_trace(operations, name)
    return build_job_trace(read_straggler_rows(path), name, _find_gpus_per_worker(path))
