"""YAML text to plain values: lines remembered, the environment filled in, everything hostile refused.

The subset is YAML 1.2's core schema: ``yes`` is text, ``1:30`` is text, dates are text. Anchors, aliases and merge keys
work within bounds; tags do not; a key may stand once. ``${env:NAME}`` and ``${env:NAME:-default}`` are the only
interpolation, and ``$$`` is a dollar sign.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Final

import yaml

from ingero.config.model import EnvText, Path, dotted
from ingero.config.scalar import read_scalar
from ingero.errors import ConfigError, ConfigProblem

MAX_BYTES: Final = 1 << 20
MAX_VALUES: Final = 100_000
MAX_DEPTH: Final = 64

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = frozenset({f"{_TAG}{kind}" for kind in ("str", "map", "seq")})
_REFERENCE: Final = re.compile(r"\$\$|\$\{([^{}]*)\}")
_ENV: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


@dataclass(slots=True)
class Document:
    """A configuration as written.

    Attributes:
        tree: Mappings, lists and scalars; JSON-able. Text that came whole from the environment is `EnvText`.
        lines: 1-based line of each key and list item.
        source: The file's name, for messages.
        problems: What is wrong so far. The values concerned are left out or stand in with their text.
        numbers: Each plain number as it is written, by its path: where a name is meant, `0042` is not 42.
    """

    tree: dict[str, object]
    lines: dict[Path, int] = field(default_factory=dict)
    source: str = ""
    problems: list[ConfigProblem] = field(default_factory=list)
    numbers: dict[Path, str] = field(default_factory=dict)

    def section(self, *keys: str) -> object:
        """The value at a path, or None when it or anything above it is absent."""
        value: object = self.tree
        for key in keys:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def raise_problems(self) -> None:
        """Raise everything found, in the order of the file.

        Raises:
            ConfigError: There is at least one problem.
        """
        if self.problems:
            ordered = sorted(set(self.problems), key=lambda one: (one.line or 0, one.path))
            raise ConfigError(ordered, source=self.source)


def load_document(
    file: str | FilePath,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Document:
    """Read a YAML file.

    Args:
        file: Its name.
        overrides: ``a.b=value`` assignments that win over the file; the value is YAML.
        environ: Where ``${env:…}`` looks; None is this process's environment.

    Returns:
        The document, whose ``problems`` may not be empty.

    Raises:
        ConfigError: The file cannot be read or is not YAML at all.
    """
    try:
        raw = FilePath(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes; this is no configuration")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason})") from error
    document = parse_document(text, source=str(file), environ=environ)
    for override in overrides:
        _override(document, override, environ)
    return document


def parse_document(
    text: str, *, source: str = "", environ: Mapping[str, str] | None = None
) -> Document:
    """Turn YAML text into a document.

    Raises:
        ConfigError: The text is not YAML, or its top is not a mapping.
    """
    builder = _Builder(os.environ if environ is None else environ)
    value = builder.build_text(text, source)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError("the document is not a mapping of sections", source=source)
    return Document(value, builder.lines, source, builder.problems, builder.numbers)


def _override(document: Document, override: str, environ: Mapping[str, str] | None) -> None:
    name, equals, text = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(
            f"--set {override!r} is not key=value",
            hint="write --set exporters.debug.verbosity=detailed",
        )
    builder = _Builder(os.environ if environ is None else environ)
    value = builder.build_text(text, f"--set {name}")
    document.problems += [
        ConfigProblem(dotted(keys), problem.message, None, problem.hint)
        for problem in builder.problems
    ]
    target = document.tree
    for key in keys[:-1]:
        inner = target.get(key)
        if not isinstance(inner, dict):
            inner = target[key] = {}
        target = inner
    target[keys[-1]] = value
    for path in [path for path in document.lines if path[: len(keys)] == keys]:
        del document.lines[path]


class _NoTypesLoader(yaml.BaseLoader):
    """Composes nodes only; scalars are typed by `read_scalar`."""


class _Builder:
    """Turns composed nodes into values, collecting lines and problems."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[ConfigProblem] = []
        self.numbers: dict[Path, str] = {}
        self._environ = environ
        self._n_values = 0
        self._source = ""
        self._open: list[int] = []

    def build_text(self, text: str, source: str) -> object:
        """Compose and build; raises ConfigError for text that is not YAML."""
        self._source = source
        try:
            node = yaml.compose(text, Loader=_NoTypesLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            message = f"not YAML: {error.problem or error.context}"
            raise ConfigError([ConfigProblem("", message, line)], source=source) from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", source=source) from error
        return None if node is None else self._build(node, ())

    def _build(self, node: yaml.Node, path: Path) -> object:
        self._n_values += 1
        if self._n_values > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"{MAX_DEPTH} levels" if len(path) > MAX_DEPTH else f"{MAX_VALUES} values"
            problem = ConfigProblem("", f"more than {limit}", node.start_mark.line + 1)
            raise ConfigError([problem], source=self._source)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._open:
            self._add_problem(path, node, "an alias contains itself")
            return None
        if node.tag not in _PLAIN_TAGS:
            self._add_problem(
                path, node, f"the tag {node.tag.replace(_TAG, '!!')} is not supported"
            )
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node, path)
        self._open.append(id(node))
        value = (
            self._build_mapping(node, path)
            if isinstance(node, yaml.MappingNode)
            else [self._build(item, (*path, index)) for index, item in enumerate(node.value)]
        )
        self._open.pop()
        return value

    def _build_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        seen: dict[str, int] = {}
        built: dict[str, object] = {}
        merged: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._add_problem(path, key_node, "a key must be text")
                continue
            key = key_node.value
            if key == "<<" and key_node.style is None:
                merged = self._build_merge(value_node, path) | merged
                continue
            if key in seen:
                self._add_problem(
                    (*path, key), key_node, f"stands twice; the first is on line {seen[key]}"
                )
                continue
            seen[key] = line
            self.lines[*path, key] = line
            built[key] = self._build(value_node, (*path, key))
        return merged | built

    def _build_merge(self, node: yaml.Node, path: Path) -> dict[str, object]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, object] = {}
        for source in sources:
            value = self._build(source, path)
            if isinstance(value, dict):
                merged = value | merged
            else:
                self._add_problem(path, source, "<< needs a mapping")
        return merged

    def _build_scalar(self, node: yaml.ScalarNode, path: Path) -> object:
        text, is_plain = node.value, node.style is None
        if "$" not in text:
            value = read_scalar(text) if is_plain else text
            if isinstance(value, float) and not math.isfinite(value):
                self._add_problem(path, node, f"{text} is not a finite number")
                return None
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.numbers[path] = text
            return value
        is_whole = is_plain and _REFERENCE.fullmatch(text) is not None and text != "$$"
        filled = _REFERENCE.sub(lambda match: self._fill(match, path, node), text)
        return EnvText(filled) if is_whole else filled

    def _fill(self, match: re.Match[str], path: Path, node: yaml.Node) -> str:
        if match[0] == "$$":
            return "$"
        reference = _ENV.fullmatch(match[1])
        if reference is None:
            hint = (
                f"write ${{env:{match[1]}}}"
                if match[1].isidentifier()
                else "only ${env:NAME} is known"
            )
            self._add_problem(path, node, f"{match[0]} cannot be filled in", hint)
            return match[0]
        name, default = reference[1], reference[2]
        if self._environ.get(name):
            return self._environ[name]
        if default is not None:
            return default
        if name not in self._environ:
            hint = f"set it, or write ${{env:{name}:-default}}"
            self._add_problem(path, node, f"the environment has no {name}", hint)
        return ""

    def _add_problem(self, path: Path, node: yaml.Node, message: str, hint: str = "") -> None:
        self.problems.append(ConfigProblem(dotted(path), message, node.start_mark.line + 1, hint))
