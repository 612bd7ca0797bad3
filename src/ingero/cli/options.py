"""Options of commands, declared as fields of a configuration class, where a default stands once.

Also the values that several commands read alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

import click
from typing_extensions import override

from ingero.units import parse_duration, parse_size


class CheckedCommand(click.Command):
    """A command that reports every wrong value at once, not the first."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as first:
            problems = self._find_problems(ctx, given)
            if len(problems) < 2:
                raise
            raise click.UsageError("\n".join(problems), ctx) from first

    def _find_problems(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, rest, _ = self.make_parser(ctx).parse_args(args)
        problems = []
        for parameter in self.params:
            try:
                parameter.handle_parse_result(ctx, values, rest)
            except click.BadParameter as error:
                problems.append(error.format_message())
        return problems


class SettingOption(click.Option):
    """An option that a settings file and the environment may give as well, where its command reads them.

    Args:
        param_decls: As click's.
        keys: Where it stands in the file, such as ``fleet.endpoint``; the first that is given there counts. One without
            a section is one of the command's own section.
        env: Variable of the environment; empty for the one that `ingero.cli.settings_file` makes of the first key.
        attrs: As click's.
    """

    def __init__(
        self,
        *param_decls: Any,  # noqa: ANN401 - click's
        keys: tuple[str, ...] = (),
        env: str = "",
        **attrs: Any,  # noqa: ANN401 - click's
    ) -> None:
        super().__init__(*param_decls, **attrs)
        self.keys = keys
        self.env = env


def _take_probe_mode(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> None:
    """Option callback: what the environment says holds unless the option is given."""
    from ingero.config.environment import ProbeMode, set_probe_mode

    if value is not None:
        set_probe_mode(ProbeMode(value))


PROBE_MODES: Final = ("session", "pair", "event", "auto")
"""Those of `ingero.config.environment.ProbeMode`, which is not imported to show help."""
PROBE_MODE_OPTION: Final = click.option(
    "--probe-mode",
    cls=SettingOption,
    keys=("agent.probe_mode",),
    env="INGERO_PROBE_MODE",
    type=click.Choice(PROBE_MODES),
    callback=_take_probe_mode,
    expose_value=False,
    is_eager=True,
    help="How to probe library calls: by session links (Linux 6.13), pairs of multi-uprobe links (6.6), or a "
    "perf event for"
    " each (5.15).  [default: $INGERO_PROBE_MODE or auto: the cheapest that the kernel has]",
)
"""For every command that probes."""


def _take_kubelet_socket(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> None:
    """Option callback: what the environment says holds unless the option is given."""
    from ingero.config.environment import set_kubelet_socket

    if value is not None:
        set_kubelet_socket(value)


KUBELET_SOCKET_OPTION: Final = click.option(
    "--kubelet-socket",
    cls=SettingOption,
    keys=("agent.kubelet_socket",),
    env="INGERO_KUBELET_SOCKET",
    metavar="PATH",
    callback=_take_kubelet_socket,
    expose_value=False,
    is_eager=True,
    help="Where the kubelet says which devices it gave to the container of a process, in Kubernetes."
    "  [default: $INGERO_KUBELET_SOCKET or /var/lib/kubelet/pod-resources/kubelet.sock]",
)
"""For every command that follows processes."""


_MAX_DURATION_NS: Final = 2**63 - 1
"""No call that waits takes more."""


def read_duration(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``5s`` as nanoseconds."""
    try:
        duration_ns = parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error
    if duration_ns > _MAX_DURATION_NS:
        raise click.BadParameter(f"{value!r} is too long; 2562047h is the most", param=parameter)
    return duration_ns


def _read_long_enough(
    least: str, context: click.Context, parameter: click.Parameter, value: str
) -> int:
    duration_ns = read_duration(context, parameter, value)
    if duration_ns < parse_duration(least):
        raise click.BadParameter(f"{value!r} is too short; use at least {least}", param=parameter)
    return duration_ns


class _FiniteFloat(click.types.FloatParamType):
    """Click's floats without what is no number and what is endless."""

    @override
    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        return _check_finite(self, super().convert(value, param, ctx), param, ctx)


class FiniteRange(_FiniteFloat, click.FloatRange):
    """The same of click's ranges."""


def _check_finite(
    kind: click.types.FloatParamType,
    number: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    if not math.isfinite(number):
        kind.fail(f"{number} is not a number that can be used.", param, ctx)
    return number


def read_size(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``64MiB`` as bytes."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


_MAX_PID: Final = 2**31 - 1
"""Of a pid_t, as in `ingero.recording.queries.window`, which is not imported to show help."""


def read_pids(
    _context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """Option callback: repeated or comma-separated process ids."""
    texts = []
    for value in values:
        given = [text.strip() for text in value.split(",") if text.strip()]
        texts += given or [value]
    for text in texts:
        if not text.isdecimal() or len(text) > 10 or int(text) > _MAX_PID:
            raise click.BadParameter(f"{text!r} is not a process id", param=parameter)
    return tuple(int(text) for text in texts)


def read_optional_duration(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """Option callback: the same, or None when it was not given."""
    return None if value is None else read_duration(context, parameter, value)


class HeaderType(click.types.StringParamType):
    """``NAME=VALUE``, whose value may have spaces: a variable of the environment has one a line."""

    @override
    def split_envvar_value(self, rv: str) -> list[str]:
        return [line for line in rv.splitlines() if line.strip()]


HEADER: Final = HeaderType()


def read_headers(
    _context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Option callback: ``NAME=VALUE``, repeated, as a mapping. No message quotes a header, which may be a secret."""
    headers = {}
    for number, value in enumerate(values, 1):
        name, separator, content = value.partition("=")
        if not separator or not name.strip():
            raise click.BadParameter(f"header {number} is not NAME=VALUE", param=parameter)
        headers[name.strip()] = content
    return headers


def check_output(output: Path, *, is_replaced: bool) -> None:
    """Refuse to overwrite a file that nobody said may go, and what is no file: a device would be replaced by one.

    Raises:
        click.UsageError: It exists, or is a device, a pipe or a folder.
    """
    if output.exists() and not output.is_file():
        raise click.UsageError(f"{output} is not a regular file, so it is not replaced")
    if output.exists() and not is_replaced:
        raise click.UsageError(f"{output} exists already; --force replaces it")


@dataclass(frozen=True, slots=True)
class _Declared:
    """What `option` was given: names on the command line (none: the field's), and settings of `click.Option`."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Group:
    """What `group` was given.

    Attributes:
        only: Fields of the inner class that are options here; none for all.
        changed: By field, settings that are different here.
    """

    only: tuple[str, ...]
    changed: Mapping[str, Mapping[str, Any]]


def option(help: str, *names: str, default: Any = MISSING, **settings: Any) -> Any:  # noqa: A002, ANN401 - as click's
    """A field of a configuration class that `with_config` turns into a command-line option.

    The type of the field says how the option is read: a path, a number, a switch, repeated values.

    Args:
        help: As ``--help`` shows it.
        names: On the command line; without one, the field's with dashes.
        default: Of the field and of the option; without one, the option is required.
        settings: Further ones of `SettingOption`; the default is shown unless it is empty or ``show_default`` says
            otherwise.
    """
    declared = _Declared(names, {"help": help, **settings})
    return field(default=default, metadata={"declared": declared})


def duration(
    help: str,  # noqa: A002 - as click.option
    *names: str,
    default: str,
    at_least: str = "0s",
    **settings: Any,  # noqa: ANN401 - as click.option
) -> Any:  # noqa: ANN401 - as click.option
    """A field in nanoseconds whose option is written ``5s`` and refused when it is shorter; see `option`."""
    read = functools.partial(_read_long_enough, at_least)
    given = {"help": help, "default": default, "type": str, "callback": read, **settings}
    return field(default=parse_duration(default), metadata={"declared": _Declared(names, given)})


def size(help: str, *names: str, default: str, **settings: Any) -> Any:  # noqa: A002, ANN401 - as click.option
    """A field in bytes whose option is written ``64MiB``; see `option`."""
    given = {"help": help, "default": default, "type": str, "callback": read_size, **settings}
    return field(default=parse_size(default), metadata={"declared": _Declared(names, given)})


def group(*only: str, **changed: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a field of any type
    """A field that is a configuration class itself, whose options stand in this place.

    Args:
        only: Its fields that are options here; the others keep their defaults. None for all.
        changed: By field, settings of the option that are different here; ``names`` among them.
    """
    return field(metadata={"declared": _Group(only, changed)})


def placed(decorator: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a field of any type
    """A field that only gives an option without a value of its own its place among the others."""
    return field(default=None, metadata={"declared": decorator})


def with_config(config: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command the options of a configuration class, and passes them as ``config``.

    A plain field of the class takes the value of the command's argument of that name.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(*args: Any, **values: Any) -> Any:  # noqa: ANN401 - click's
            return command(*args, config=take_config(config, values), **values)

        for build in reversed(list(_iter_options(config, _Group((), {})))):
            call = build(call)
        return call

    return decorate


def _iter_options(config: type[Any], here: _Group) -> Iterator[Callable[[Any], Any]]:
    types = get_type_hints(config)
    own = {one.name: one for one in fields(config)}
    for one in [own[name] for name in here.only or own]:
        declared = one.metadata.get("declared")
        if isinstance(declared, _Group):
            yield from _iter_options(types[one.name], declared)
        elif callable(declared):
            yield declared
        elif declared is not None:
            changed = here.changed.get(one.name, {})
            yield _build_option(
                one,
                {
                    "keys": (_find_key(one, getattr(config, "section", "")),),
                    **_describe_type(types[one.name]),
                    **declared.settings,
                    **changed,
                },
            )


def _find_key(one: Field[Any], section: str) -> str:
    """Where an option stands in a settings file: its first long name, below the section of its class."""
    names = [name.split("/")[0] for name in one.metadata["declared"].names if name.startswith("--")]
    name: str = (names or [one.name])[0]
    name = name.removeprefix("--").replace("-", "_")
    if not section:
        return name
    return f"{section}.{'enabled' if name == section else name.removeprefix(f'{section}_')}"


def _build_option(one: Field[Any], settings: dict[str, Any]) -> Callable[[Any], Any]:
    names = settings.pop("names", one.metadata["declared"].names)
    if one.default is not MISSING:
        settings.setdefault("default", one.default)
    settings.setdefault("required", "default" not in settings)
    settings.setdefault("show_default", settings.get("default") not in {None, "", False, ()})
    long = f"--{one.name.replace('_', '-')}"
    return click.option(one.name, *(names or (long,)), cls=SettingOption, **settings)


def _describe_type(annotation: object) -> Mapping[str, Any]:
    """Settings of `click.Option` that follow from the type of a field."""
    parts = set(get_args(annotation)) - {type(None)} or {annotation}
    if get_origin(annotation) is tuple:
        return {"multiple": True}
    if Path in parts:
        return {"type": click.Path(path_type=Path)}
    if bool in parts:
        return {"is_flag": True}
    return {"type": int} if int in parts else {"type": _FiniteFloat()} if float in parts else {}


def take_config(config: type[Any], values: dict[str, Any]) -> Any:  # noqa: ANN401 - an instance of config
    """Build the configuration from a command's values, which are left without its own."""
    types, given = get_type_hints(config), {}
    for one in fields(config):
        if isinstance(one.metadata.get("declared"), _Group):
            given[one.name] = take_config(types[one.name], values)
        elif one.name in values:
            given[one.name] = values.pop(one.name)
    return config(**given)


def database(help: str = "Recording to read.", *names: str) -> Any:  # noqa: A002, ANN401 - as option
    """A field for a recording; None is the default one."""
    return option(f"{help}  [default: $INGERO_DB or ~/.ingero/ingero.db]", *names, default=None)


def process_ids(help: str = "Only these processes.") -> Any:  # noqa: A002, ANN401 - as option
    """A field for process ids, repeated or separated by commas."""
    return option(
        help, "--pid", "-p", default=(), multiple=True, callback=read_pids, metavar="PID[,PID]"
    )


def header_values() -> Any:  # noqa: ANN401 - as option
    """A field for headers to send along."""
    return option(
        "A header to send along, such as Authorization='Bearer …'; may be repeated.",
        "--header",
        default=(),
        multiple=True,
        type=HEADER,
        metavar="NAME=VALUE",
        callback=read_headers,
    )


def json_switch(help: str = "Print one JSON object.") -> Any:  # noqa: A002, ANN401 - as option
    """A field that asks for JSON instead of text."""
    return option(help, "--json", default=False)


def output_file() -> Any:  # noqa: ANN401 - as option
    """A field for the file to write; see `check_output`."""
    return option(
        "File to write.", "--output", "-o", type=click.Path(path_type=Path, dir_okay=False)
    )


def force_switch() -> Any:  # noqa: ANN401 - as option
    """A field that allows `check_output` to replace the file."""
    return option("Replace the output file if it exists.", "--force", default=False)
