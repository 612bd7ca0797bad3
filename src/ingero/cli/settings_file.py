"""Options that a settings file, ``ingero.yaml``, and the environment give as well as the command line.

A command of the class `ConfiguredCommand` takes each of its options from the command line, else from a variable, else
from the file, else its default. Key and variable follow from the option itself, so that there is none without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from ingero.cli.options import CheckedCommand, SettingOption
from ingero.errors import ConfigProblem

if TYPE_CHECKING:
    from ingero.config.document import Document

OLD_KEYS: Final[Mapping[str, str]] = {
    "agent.log_level": "give --debug to log everything",
    "agent.max_overhead_percent": "trace.sampling_rate 0 adapts to the load",
    "alerter.pagerduty": "set INGERO_PAGERDUTY_KEY in the environment of `ingero mcp`",
    "fleet.nodes": "give --nodes to query, explain and export",
    "health": "how the score is made is fixed, see docs/specs/agent-health.md",
    "inference.baseline": "write inference.warmup",
    "inference.daemon": "give --duration, and --log for a copy of standard error",
    "inference.db_rollover": "write trace.db_rollover_size and trace.db_rollover_keep",
    "inference.outlier": "write inference.outlier_ratio",
    "inference.phase": "prefill and decode are distinguished by what each server's own steps are",
    "inference.scrape": "write inference.scrape_engines, inference.scrape_interval and inference.scrape_host",
    "mcp": "give its options to `ingero mcp`",
    "otlp.export_interval": "metrics are pushed every 10 s, spans when an episode ends",
    "otlp.protocol": "spans are pushed as OTLP/HTTP with protobuf",
    "probes": "all are on; trace.no_io, trace.no_tcp and trace.no_net leave some out",
    "prometheus": "write trace.prometheus or fleet_push.prometheus",
    "store": "write trace.db, trace.max_db or trace.db_rollover_size",
}
"""Keys, and sections, of the existing agent's file that mean nothing here, and what to do instead.

Source: configs/ingero.yaml of the existing agent v0.17, which ignores most of them too.
"""
WHERE: Final = "$INGERO_CONFIG, or the first of ./ingero.yaml, /etc/ingero/ingero.yaml, ~/.config/ingero/ingero.yaml"
"""What `ingero.config.agent_file` does, which is not imported to show help."""
_RANKS: Final = (
    ParameterSource.DEFAULT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.ENVIRONMENT,
    ParameterSource.COMMANDLINE,
)
_WARNED: Final = "ingero.settings_file.warned"


class ConfiguredCommand(CheckedCommand):
    """A command whose options may stand in the environment and in the settings file."""

    def __init__(self, *args: Any, **attrs: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **attrs)
        for option in self.iter_settings():
            option.envvar = find_variables(option, self.find_keys(option))
        self.params.insert(0, _build_config_option())

    def iter_settings(self) -> Iterator[SettingOption]:
        """Every option that a file may give."""
        for option in self.params:
            if isinstance(option, SettingOption):
                yield option

    @property
    def section(self) -> str:
        """The section of the file that is its own."""
        return (self.name or "").replace("-", "_")

    def find_keys(self, option: SettingOption) -> tuple[str, ...]:
        """Where one of them stands in the file."""
        return tuple(key if "." in key else f"{self.section}.{key}" for key in option.keys)


def find_variables(option: SettingOption, keys: tuple[str, ...]) -> list[str]:
    """Variables of the environment for an option that stands under these keys of the file."""
    return (
        [option.env] if option.env else [f"INGERO_{key.replace('.', '_').upper()}" for key in keys]
    )


def find_precedence(context: click.Context, name: str) -> int:
    """How strongly an option was given: one of a higher number wins over one that it excludes."""
    source = context.get_parameter_source(name)
    return _RANKS.index(source) if source in _RANKS else 0


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file.

    Attributes:
        key: Dotted, such as ``fleet.endpoint``.
        uses: Commands that read it, each with its option.
    """

    key: str
    uses: tuple[tuple[ConfiguredCommand, SettingOption], ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables of the environment that win over it."""
        found = (find_variables(option, command.find_keys(option)) for command, option in self.uses)
        return tuple(dict.fromkeys(name for names in found for name in names))

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of its options on the command line."""
        return tuple(dict.fromkeys(name for _, option in self.uses for name in option.opts))


def find_settings(program: click.Command) -> dict[str, Setting]:
    """Every key that the file of a program may have, in the order of its commands and their options."""
    commands = program.commands.values() if isinstance(program, click.Group) else (program,)
    uses: dict[str, list[tuple[ConfiguredCommand, SettingOption]]] = {}
    for command in commands:
        if isinstance(command, ConfiguredCommand):
            for option in command.iter_settings():
                for key in command.find_keys(option):
                    uses.setdefault(key, []).append((command, option))
    return {key: Setting(key, tuple(found)) for key, found in uses.items()}


@dataclass(slots=True)
class SettingsFile:
    """What a file says.

    Attributes:
        file: Its name.
        values: By key, as click takes them.
        lines: By key, where it stands.
        ignored: Keys of the existing agent that mean nothing here, with what to do instead.
        settings: Every key that a file may have.
    """

    file: str
    settings: Mapping[str, Setting]
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int | None] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def build_map(self, command: ConfiguredCommand) -> dict[str, Any]:
        """Values by the name of a command's option."""
        found = {}
        for option in command.iter_settings():
            keys = [key for key in command.find_keys(option) if key in self.values]
            if keys and option.name is not None:
                found[option.name] = self.values[keys[0]]
        return found

    def iter_warnings(self, command: ConfiguredCommand | None = None) -> Iterator[str]:
        """What has no effect: old keys; and keys that a command has no option for, but those of another's section."""
        for key, instead in self.ignored.items():
            yield f"{self.file}: {key}: no effect; {instead}"
        if command is None:
            return
        for key in self.values:
            users = [user for user, _ in self.settings[key].uses]
            if command not in users and key.split(".")[0] not in {user.section for user in users}:
                yield f"{self.file}: {key}: no effect on `ingero {command.name}`, which has no such option"


def load_settings(file: Path, program: click.Command) -> SettingsFile:
    """Read and check a settings file.

    Args:
        file: Its name.
        program: The root command; its `ConfiguredCommand` say which keys there are.

    Raises:
        ConfigError: It cannot be read; or lists every unknown key and wrong value with its line.
    """
    from ingero.config.document import load_document

    document = load_document(file)
    reader = _Reader(document, find_settings(program))
    reader.read()
    document.raise_problems()
    return reader.found


class _Reader:
    """Goes through a document, key by key."""

    def __init__(self, document: Document, settings: Mapping[str, Setting]) -> None:
        self.found = SettingsFile(document.source, settings)
        self._document = document
        self._settings = settings
        self._sections: dict[str, list[str]] = {}
        for key in settings:
            section, _, name = key.partition(".")
            self._sections.setdefault(section, []).append(name)

    def read(self) -> None:
        for section, inside in self._document.tree.items():
            if section not in self._sections:
                self._refuse_or_ignore((section,), list(self._sections))
            elif inside is not None and not isinstance(inside, Mapping):
                self._add_problem((section,), "should be a section of keys")
            elif isinstance(inside, Mapping):
                self._read_section(section, inside)

    def _read_section(self, section: str, inside: Mapping[str, object]) -> None:
        from ingero.config.model import EnvText

        for name, value in inside.items():
            setting = self._settings.get(f"{section}.{name}")
            if setting is None:
                self._refuse_or_ignore((section, name), self._sections[section])
            elif value is not None and not (isinstance(value, EnvText) and not value):
                self._take(setting, (section, name), value)

    def _refuse_or_ignore(self, path: tuple[str, ...], known: list[str]) -> None:
        key = ".".join(path)
        if key in OLD_KEYS:
            self.found.ignored[key] = OLD_KEYS[key]
            return
        inside = [old.split(".")[1] for old in OLD_KEYS if old.startswith(f"{key}.")]
        section = self._document.tree[path[0]]
        if len(path) == 1 and inside and isinstance(section, Mapping):
            for name in section:
                self._refuse_or_ignore((*path, name), inside)
            return
        from ingero.config.model import nearest

        self._add_problem(path, "unknown key", nearest(path[-1], known))

    def _take(self, setting: Setting, path: tuple[str, ...], value: object) -> None:
        for command, option in setting.uses:
            try:
                given = _read_value(option, self._find_written(option, path, value))
                with click.Context(command, info_name=command.name) as context:
                    typed = option.type_cast_value(context, given)
                    if option.callback is not None and option.expose_value:
                        option.callback(context, option, typed)
            except (click.BadParameter, ValueError) as error:
                self._add_problem(
                    path, error.message if isinstance(error, click.BadParameter) else str(error)
                )
                return
            self.found.values[setting.key] = given
        self.found.lines[setting.key] = self._find_line(path)

    def _find_written(
        self, option: SettingOption, path: tuple[str | int, ...], value: object
    ) -> object:
        """A value as it is written where the option takes text: the name ``0042`` is not 42, nor ``1.10`` 1.1."""
        from ingero.config.scalar import read_scalar

        if isinstance(value, list):
            return [self._find_written(option, (*path, i), one) for i, one in enumerate(value)]
        text = self._document.numbers.get(path)
        is_text = isinstance(option.type, click.types.StringParamType | click.Path)
        if text is None or not is_text or option.callback is not None or read_scalar(text) != value:
            return value
        return text

    def _add_problem(self, path: tuple[str, ...], message: str, hint: str = "") -> None:
        problem = ConfigProblem(".".join(path), message, self._find_line(path), hint)
        self._document.problems.append(problem)

    def _find_line(self, path: tuple[str, ...]) -> int | None:
        from ingero.config.model import find_line

        return find_line(path, self._document.lines)


def _read_value(option: SettingOption, value: object) -> object:
    """A value of the file as click takes one of the command line.

    Raises:
        ValueError: It is of another kind than the option's.
    """
    from ingero.config.model import EnvText
    from ingero.config.scalar import read_scalar

    if option.multiple:
        return [_read_text(item) for item in (value if isinstance(value, list) else [value])]
    if option.is_bool_flag:
        value = read_scalar(value) if isinstance(value, EnvText) else value
        if not isinstance(value, bool):
            raise ValueError(f"should be true or false, not {value!r}")
        return value
    if isinstance(value, bool) and isinstance(option.flag_value, str):
        return option.flag_value if value else ""  # given without a value on the command line
    return _read_text(value)


def _read_text(value: object) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    given = "several" if isinstance(value, list | dict) else json.dumps(value)
    raise ValueError(f"should be one text or number, not {given}")


def _build_config_option() -> click.Option:
    return click.Option(
        ["--config", "settings_file"],
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_take_file,
        help="Settings in YAML. A flag wins over the environment, such as INGERO_FLEET_ENDPOINT, and that wins over "
        f"the file.  [default: {WHERE}]",
    )


def _take_file(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """Option callback: let the command's options fall back on the file."""
    from ingero.config.agent_file import find_settings_file

    file = Path(value) if value else find_settings_file()
    command = context.command
    if file is None or context.resilient_parsing or not isinstance(command, ConfiguredCommand):
        return
    found = load_settings(file, context.find_root().command)
    context.default_map = found.build_map(command)
    if not context.meta.setdefault(_WARNED, False):
        context.meta[_WARNED] = True
        for warning in found.iter_warnings(command):
            click.echo(f"warning: {warning}", err=True)
