"""The first steps of the trace that the package brings, for tests that show nothing more by its length."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingero.job_traces.readers import find_packaged


def read_first_steps(n_steps):
    """The columns of AR, which has 44 steps."""
    table = pq.read_table(find_packaged("AR"))
    columns = {name: table[name].to_numpy() for name in table.schema.names}
    is_kept = columns["step"] < np.unique(columns["step"])[n_steps]
    return {name: column[is_kept] for name, column in columns.items()}


def write_first_steps(path, n_steps):
    """A trace of these steps alone; its path."""
    pq.write_table(pa.table(read_first_steps(n_steps)), path)
    return path
