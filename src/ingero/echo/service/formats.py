"""The formats of an answer's rows beside JSON: a line per row, or an Arrow stream."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from msgspec import inspect
from typing_extensions import override

from ingero.echo.service.replies import JSON, ErrorReply

NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
_ANY: Final = frozenset({JSON, "application/*", "*/*"})
_SQL_BATCH: Final = 1024

_TYPES: Final[dict[type, pa.DataType]] = {
    inspect.StrType: pa.string(),
    inspect.IntType: pa.int64(),
    inspect.FloatType: pa.float64(),
    inspect.BoolType: pa.bool_(),
    inspect.DateTimeType: pa.timestamp("us", tz="UTC"),
}


class RowFormat:
    """Writes one answer, part by part. Each part is whole: nothing is held back for the next."""

    media_type: str
    is_ended_by_fault: bool
    """Whether an answer that ends in `fail` is complete as far as HTTP can tell; if not, it must be cut off."""

    def begin(self, schema: pa.Schema, frame: bytes) -> bytes:
        """What comes before the rows. ``frame`` is the rest of the answer as a JSON object."""
        del schema, frame
        return b""

    def write(self, batch: pa.RecordBatch) -> bytes:
        """Rows."""
        raise NotImplementedError

    def end(self) -> bytes:
        """What comes after the last row."""
        return b""

    def fail(self, reply: ErrorReply) -> bytes:
        """What comes instead of the rows that are missing."""
        raise NotImplementedError


class NdjsonFormat(RowFormat):
    """One JSON object a line; after an error one last object with ``error`` and ``code``, which no row has."""

    media_type = NDJSON
    is_ended_by_fault = True

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    @override
    def write(self, batch: pa.RecordBatch) -> bytes:
        return self._encoder.encode_lines(batch.to_pylist())

    @override
    def fail(self, reply: ErrorReply) -> bytes:
        return self._encoder.encode_lines([reply.body])


class ArrowFormat(RowFormat):
    """An Arrow IPC stream; the schema's metadata has the rest of the answer under ``ingero.answer``.

    An error is an empty last batch with ``error`` and ``code`` in its metadata, without the end-of-stream marker. Since
    most readers drop a batch's metadata, the HTTP answer is cut off after it as well.

    Source: Arrow columnar format 1.5, "IPC Streaming Format"; ``Message.custom_metadata``.
    """

    media_type = ARROW
    is_ended_by_fault = False

    def __init__(self) -> None:
        self._sink = io.BytesIO()
        self._writer: Any = None
        self._schema: pa.Schema | None = None

    @override
    def begin(self, schema: pa.Schema, frame: bytes) -> bytes:
        self._schema = schema.with_metadata({b"ingero.answer": frame})
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        return self._drain()

    @override
    def write(self, batch: pa.RecordBatch) -> bytes:
        self._writer.write_batch(batch)
        return self._drain()

    @override
    def end(self) -> bytes:
        self._writer.close()
        return self._drain()

    @override
    def fail(self, reply: ErrorReply) -> bytes:
        assert self._schema is not None
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._writer.write_batch(empty, custom_metadata=reply.body)
        return self._drain()

    def _drain(self) -> bytes:
        written = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return written


FORMATS: Final[dict[str, type[RowFormat]]] = {
    NDJSON: NdjsonFormat,
    ARROW: ArrowFormat,
}


def choose_format(accept: str) -> RowFormat | None:
    """What ``Accept`` prefers, the first of equals; None is JSON, which also answers what asks for neither.

    Source: RFC 9110, 12.5.1.
    """
    best, best_weight = JSON, 0.0
    for item in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in item.split(";"))
        weight = _weigh(parameters)
        if (kind in FORMATS or kind in _ANY) and weight > best_weight:
            best, best_weight = kind, weight
    form = FORMATS.get(best)
    return None if form is None else form()


def _weigh(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(float(value), 1.0)
            except ValueError:
                return 0.0
    return 1.0


def build_schema(row: type[msgspec.Struct]) -> pa.Schema:
    """The Arrow schema of a row: times in UTC microseconds, every column nullable."""
    info = inspect.type_info(row)
    assert isinstance(info, inspect.StructType)
    return pa.schema([(one.encode_name, _arrow_type(one.type)) for one in info.fields])


def _arrow_type(found: inspect.Type) -> pa.DataType:
    if isinstance(found, inspect.Metadata):
        return _arrow_type(found.type)
    if isinstance(found, inspect.UnionType):
        (some,) = (one for one in found.types if not isinstance(one, inspect.NoneType))
        return _arrow_type(some)
    if isinstance(found, inspect.ListType):
        return pa.list_(_arrow_type(found.item_type))
    return _TYPES[type(found)]


def iter_sql(
    form: RowFormat, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> Iterator[bytes]:
    """The answer to a tenant's statement; in Arrow, types follow from the values and mixed columns are JSON text."""
    if isinstance(form, NdjsonFormat):
        yield msgspec.json.Encoder().encode_lines(
            dict(zip(columns, row, strict=True)) for row in rows
        )
        return
    arrays = [_infer([row[at] for row in rows]) for at in range(len(columns))]
    table = pa.table(arrays, names=list(columns))
    yield form.begin(table.schema, b"{}")
    for batch in table.to_batches(max_chunksize=_SQL_BATCH):
        yield form.write(batch)
    yield form.end()


def _infer(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([msgspec.json.encode(value).decode() for value in values])
