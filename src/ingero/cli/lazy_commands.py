"""Commands of a group that are imported when they are asked for, not when the program starts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping

import click
from typing_extensions import override

from ingero.cli.help import keep_line_breaks


class LazyCommands(MutableMapping[str, click.Command]):
    """The commands of a `click.Group` by name; a name is known without the import of its module.

    Args:
        places: Where each command is, as ``module:attribute`` by name.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._commands: dict[str, click.Command] = {}

    @override
    def __getitem__(self, name: str) -> click.Command:
        if name not in self._commands:
            module, _, attribute = self._places[name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            keep_line_breaks(command)
            self._commands[name] = command
        return self._commands[name]

    @override
    def __setitem__(self, name: str, command: click.Command) -> None:
        self._places.setdefault(name, "")
        self._commands[name] = command

    @override
    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._commands.pop(name, None)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @override
    def __len__(self) -> int:
        return len(self._places)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._places
