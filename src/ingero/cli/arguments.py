"""A command line as the existing agent's programs take it, turned into one that click takes.

Three liberties beside the table of old options: a switch may have a value (``--record=false``), a long name may have
one dash (``-listen :9464``), and what stands for a whole program may follow its command (``ingero trace --debug``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import click

from ingero.cli.compatibility import OPTIONS, OldOption

_TRUE: Final = frozenset(("1", "t", "true"))
_FALSE: Final = frozenset(("0", "f", "false"))
"""Source: Go's strconv.ParseBool, in any case."""


@dataclass(slots=True)
class Arguments:
    """What a command line became.

    Attributes:
        now: For click.
        ignored: Options that have no effect, by the reason.
        effects: Old options to obey before the command runs, with their values.
    """

    now: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    effects: list[tuple[OldOption, str]] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """One line per reason."""
        return [
            f"{', '.join(names)}: no effect; {description}"
            for description, names in self.ignored.items()
        ]


def modernise(program: click.Command, args: Sequence[str]) -> Arguments:
    """Turn a command line into one that click takes.

    Args:
        program: The root command.
        args: Without the program's name.

    Raises:
        click.UsageError: A switch has a value that is neither true nor false, or an option is refused.
    """
    found = Arguments()
    name = program.name or ""
    if name == "ingero" and list(args) == [
        "-v"
    ]:  # as the existing one does; elsewhere -v is --verbose
        found.now.append("--version")
        return found
    _Reader(program, name, list(args), found).read()
    return found


def iter_old(program: click.Command) -> Iterator[OldOption]:
    """Old options of a program that its commands do not have themselves by now."""
    for old in OPTIONS:
        root, *names = old.where.split()
        if root != program.name:
            continue
        command = program
        for name in names:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        own = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
        if not own.issuperset(old.names.split()):
            yield old


class _Reader:
    """Reads one command's part of the line."""

    def __init__(
        self, command: click.Command, path: str, rest: list[str], found: Arguments
    ) -> None:
        self._command = command
        self._path = path
        self._rest = rest
        self._found = found
        self._own = {
            name: option
            for option in command.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        self._old = _old_options(path)

    def read(self) -> None:
        """Read to the end, or to the subcommand, which reads on."""
        now = self._found.now
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":
                now += [word, *self._rest]
                return
            if len(word) > 1 and word.startswith("-"):
                self._read_option(word)
                continue
            now.append(word)
            inner = (
                self._command.commands.get(word) if isinstance(self._command, click.Group) else None
            )
            if inner is not None:
                _Reader(inner, f"{self._path} {word}", self._rest, self._found).read()
                return

    def _read_option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2 and self._is_known(f"-{name}"):
            name = f"-{name}"
        given = value if equals else None
        if name in self._own:
            self._read_own(name, given)
        elif name in self._old:
            self._read_old(self._old[name], name, given)
        else:
            self._found.now.append(word)

    def _is_known(self, name: str) -> bool:
        return name in self._own or name in self._old

    def _read_own(self, name: str, value: str | None) -> None:
        option, now = self._own[name], self._found.now
        if option.is_flag and value is not None and not option.count:
            now += _switch(option, name, is_on=_read_switch(name, value))
        else:
            now.append(name if value is None else f"{name}={value}")
            if not option.is_flag and value is None and self._has_value_next():
                now.append(self._rest.pop(0))

    def _has_value_next(self) -> bool:
        """Whether the next word is a value; after an option whose value may be left out it may be the next option."""
        return bool(self._rest) and self._rest[0] != "--" and not self._is_known(self._rest[0])

    def _read_old(self, old: OldOption, name: str, value: str | None) -> None:
        if old.is_refused:
            raise click.UsageError(f"{name} is not taken: {old.description}")
        if old.takes and value is None:
            if not self._rest:
                raise click.UsageError(f"{name} needs a value: {old.takes}")
            value = self._rest.pop(0)
        if not old.takes and value is not None and not _read_switch(name, value):
            if old.off:
                self._found.ignored.setdefault(old.off, []).append(f"{name}={value}")
            return
        self._found.now += [part.replace("{}", value or "") for part in old.now or ()]
        if old.does is not None:
            self._found.effects.append((old, value or ""))
        elif old.now is None:
            self._found.ignored.setdefault(old.description, []).append(name)


def _old_options(path: str) -> dict[str, OldOption]:
    """By name; that of a command itself before that of what is above it."""
    fitting = [old for old in OPTIONS if path == old.where or path.startswith(f"{old.where} ")]
    fitting.sort(key=lambda old: len(old.where))
    return {name: old for old in fitting for name in old.names.split()}


def _read_switch(name: str, value: str) -> bool:
    lowered = value.lower()
    if lowered not in _TRUE | _FALSE:
        raise click.UsageError(f"{name}={value}: write true or false")
    return lowered in _TRUE


def _switch(option: click.Option, name: str, *, is_on: bool) -> list[str]:
    """The words for a switch that was given a value."""
    if name in option.secondary_opts:
        is_on = not is_on
    longest = max(option.opts, key=len)
    if is_on:
        return [longest]
    if option.secondary_opts:
        return [max(option.secondary_opts, key=len)]
    return []
