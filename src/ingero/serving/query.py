"""`Query`: a question defined once, asked by the CLI, over HTTP and over MCP with the same answer.

A program lists its questions in a literal tuple. Each has typed arguments and a typed result (msgspec structs), from
which the JSON Schemas are derived; arguments are validated on the way in and the encoded answer on the way out, so a
schema that a client reads is never a promise that the code does not keep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from ingero.errors import BadDataError, IngeroError

ContextT = TypeVar("ContextT")
ArgsT = TypeVar("ArgsT", bound=msgspec.Struct)
ResultT = TypeVar("ResultT", bound=msgspec.Struct)

_EXACT_FLOAT: Final = 2.0**53
NAME: Final = re.compile(r"[a-z][a-z0-9_.]{1,127}")
"""Grammar of a question's name; clients of the existing system check it."""


class ArgumentError(BadDataError):
    """Arguments that do not fit a question's schema; the message names the field and what it must be."""


class AnswerError(IngeroError):
    """An answer that does not fit its own schema: a defect of ours, never shown with its data."""


@dataclass(frozen=True, slots=True)
class Query(Generic[ContextT, ArgsT, ResultT]):
    """One question.

    Attributes:
        name: What clients call, such as ``fleet.cluster.summary``.
        title: A few words for a menu.
        description: What it answers and when to ask it, for a person or an assistant that chooses between questions.
        args: Struct of the arguments; must forbid unknown fields.
        result: Struct of the answer.
        run: Answers. Blocks; callers on an event loop put it on a thread. Raises `BadDataError` for arguments that
            are well-formed and still wrong.
        is_read_only: Nothing is changed anywhere by asking.
        is_open_world: It reaches beyond what the server serves.
    """

    name: str
    title: str
    description: str
    args: type[ArgsT]
    result: type[ResultT]
    run: Callable[[ContextT, ArgsT], ResultT] = field(repr=False)
    is_read_only: bool = True
    is_open_world: bool = False

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None:
            raise ValueError(f"{self.name!r} is no name for a question: want {NAME.pattern}")
        if not self.args.__struct_config__.forbid_unknown_fields:
            raise ValueError(f"{self.name}: {self.args.__name__} must forbid unknown fields")

    def input_schema(self) -> dict[str, Any]:
        """JSON Schema (2020-12) of the arguments, an object at its root."""
        return build_schema(self.args)

    def output_schema(self) -> dict[str, Any]:
        """JSON Schema (2020-12) of the answer, an object at its root."""
        return build_schema(self.result)

    def parse_args(self, arguments: bytes | Mapping[str, Any] | None) -> ArgsT:
        """Turn a JSON document, or what one decodes to, into arguments.

        Raises:
            ArgumentError: They do not fit the schema.
        """
        try:
            given = (
                msgspec.json.decode(arguments) if isinstance(arguments, bytes) else arguments or {}
            )
            return msgspec.convert(_integral(given), self.args)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ArgumentError(
                f"{self.name}: {why}", hint="The tool's input schema lists its arguments."
            ) from None

    def encode(self, result: ResultT) -> bytes:
        """Encode an answer as JSON and hold it to its own schema.

        Raises:
            AnswerError: The answer breaks its schema.
        """
        encoded = msgspec.json.encode(result)
        try:
            msgspec.json.decode(encoded, type=self.result)
        except msgspec.ValidationError as error:
            raise AnswerError(f"{self.name}: the answer breaks its own schema: {error}") from error
        return encoded

    def ask(self, context: ContextT, arguments: bytes | Mapping[str, Any] | None = None) -> bytes:
        """Parse, run and encode: what a transport does with a call.

        Raises:
            ArgumentError: The arguments do not fit.
            AnswerError: The answer does not fit.
        """
        return self.encode(self.run(context, self.parse_args(arguments)))


def _integral(value: object) -> object:
    """The same with 2.0 as 2: JSON Schema (2020-12, 4.2.3) calls both an integer, msgspec only the second."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT else value
    if isinstance(value, Mapping):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class PromptArgument:
    """One text argument of a prompt."""

    name: str
    description: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A recipe that an assistant can ask for.

    Attributes:
        name: What clients call.
        description: What the recipe is for.
        arguments: Its text arguments.
        render: The recipe's text for these arguments.
    """

    name: str
    description: str
    arguments: tuple[PromptArgument, ...]
    render: Callable[[Mapping[str, str]], str] = field(repr=False)


def build_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of a struct with the struct's own object at the root.

    MCP wants ``type: object`` there, and msgspec puts a reference; the definitions that the root needs stay below
    ``$defs``.

    Source: MCP 2025-11-25 and older, ``Tool.inputSchema``.
    """
    schema = msgspec.json.schema(struct)
    definitions: dict[str, Any] = schema.get("$defs", {})
    root_name = str(schema["$ref"]).rsplit("/", 1)[-1]
    root: dict[str, Any] = dict(definitions.pop(root_name))
    root.setdefault("type", "object")
    if definitions:
        root["$defs"] = definitions
    return root


def get_query(queries: Sequence[Query[ContextT, Any, Any]], name: str) -> Query[ContextT, Any, Any]:
    """The question of this name.

    Raises:
        KeyError: There is none.
    """
    for query in queries:
        if query.name == name:
            return query
    raise KeyError(name)
