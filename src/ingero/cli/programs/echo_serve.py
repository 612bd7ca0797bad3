"""``ingero-echo serve``, ``mcp``, ``validate`` and ``config``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ingero.cli.programs.echo_files import with_key
from ingero.errors import ConfigError, ConfigProblem, UnsupportedError

if TYPE_CHECKING:
    from ingero.config.acl import AclEntry
    from ingero.echo.service.config import EchoConfig

OptionValue = str | bool | tuple[str, ...] | None

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--config", "file", metavar="FILE", help="Settings in YAML; flags win over it."),
    click.option("--otlp-addr", metavar="HOST:PORT", help="OTLP/gRPC.  [127.0.0.1:4317]"),
    click.option("--otlp-http-addr", metavar="HOST:PORT", help="OTLP/HTTP.  [127.0.0.1:4318]"),
    click.option("--mcp-addr", metavar="HOST:PORT", help="MCP and HTTP API.  [127.0.0.1:8081]"),
    click.option("--health-addr", metavar="HOST:PORT", help="/healthz.  [127.0.0.1:8080]"),
    click.option("--db", "--db-path", "db", metavar="FILE", help="Database.  [~/.ingero/echo.db]"),
    with_key,
    click.option(
        "--store", metavar="URL", help="ClickHouse instead: clickhouses://USER@HOST:PORT/DATABASE."
    ),
    click.option("--store-password-file", metavar="FILE", help="File with that user's password."),
    click.option(
        "--auth-token", metavar="TOKEN", help="One bearer; others on this machine can see it."
    ),
    click.option("--auth-token-file", metavar="FILE", help="File with one bearer token."),
    click.option("--bearer-acl-file", metavar="FILE", help="File with bearers and their clusters."),
    click.option(
        "--acl-empty-means-all", is_flag=True, default=None, help="Empty allowed_clusters is all."
    ),
    click.option("--token-grace", metavar="DURATION", help="Life of a rotated token.  [5m]"),
    click.option("--tls-cert", metavar="FILE", help="PEM certificate chain."),
    click.option("--tls-key", metavar="FILE", help="PEM private key, readable by its owner only."),
    click.option(
        "--insecure-no-tls", is_flag=True, default=None, help="No TLS; loopback addresses only."
    ),
    click.option(
        "--trust-proxy-headers", is_flag=True, default=None, help="Believe X-Forwarded-For."
    ),
    click.option("--retention", metavar="DURATION", help="Age at which rows go.  [720h]"),
    click.option(
        "--trust-clock", is_flag=True, default=None, help="Retention believes the clock at once."
    ),
    click.option("--max-db-size", metavar="SIZE", help="Size at which the oldest rows go."),
    click.option("--memory-limit", metavar="SIZE", help="Memory of the database.  [1GiB]"),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any key of the file."
    ),
)


def _with_options(command: CommandT) -> CommandT:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _load(options: dict[str, OptionValue]) -> EchoConfig:
    try:
        from ingero.config.document import load_document
        from ingero.config.model import check_model
        from ingero.echo.service.config import EchoConfig
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"this installation has no {missing.name}", hint="pip install 'ingero[echo]'"
        ) from missing
    file, overrides = options.pop("file"), options.pop("overrides")
    document = load_document(str(file or os.devnull), _texts(overrides))
    document.raise_problems()
    given = {name: value for name, value in options.items() if value is not None}
    parsed, problems = check_model(EchoConfig, {**document.tree, **given}, lines=document.lines)
    if parsed is None:
        flags = given if file else options  # what is in the file keeps the file's names
        described = [_say_flags(problem, flags) for problem in problems]
        raise ConfigError(
            described, source=str(file or ""), hint="`ingero-echo serve --help` lists the flags."
        )
    return parsed


def _say_flags(problem: ConfigProblem, flags: Iterable[str]) -> ConfigProblem:
    """The problem in the words that its user wrote."""
    names = "|".join(sorted(flags, key=len, reverse=True)) or "(?!)"
    message, path = (
        re.sub(rf"(?<![\w.])({names})(?![\w.])", lambda found: _flag(found[1]), text)
        for text in (problem.message, problem.path)
    )
    line = problem.line if path == problem.path else None
    return replace(problem, path=path, message=message, line=line)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: OptionValue) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: OptionValue) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _token_loader(config: EchoConfig, token: str | None) -> Callable[[], tuple[AclEntry, ...]]:
    from ingero.config.acl import find_auth_token, parse_acl, parse_token

    if token is not None:
        return lambda: parse_token(token, "--auth-token")
    if config.auth_token_file is not None:
        file = config.auth_token_file
        return lambda: parse_token(_read(file), file)
    if config.bearer_acl_file is not None:
        acl = config.bearer_acl_file
        return lambda: _hold_to_tls(
            parse_acl(_read(acl), acl, is_empty_all=config.acl_empty_means_all), config
        )
    from_environment = find_auth_token()
    if from_environment is not None:
        return lambda: parse_token(from_environment, "AUTH_TOKEN")
    raise ConfigError(
        "nobody could ask: there is no bearer token",
        hint="(umask 077; openssl rand -hex 32 > token); then give --auth-token-file token",
    )


def _hold_to_tls(entries: tuple[AclEntry, ...], config: EchoConfig) -> tuple[AclEntry, ...]:
    """Refuse bearers with a certificate where none is asked for: they could never send."""
    named = next((entry.key_name for entry in entries if entry.certificate), None)
    if named is not None and config.otlp_client_ca_file is None:
        raise ConfigError(
            f"{named} has a certificate, and no client is asked for one",
            source=config.bearer_acl_file or "",
            hint="otlp_client_ca_file names the authorities of clients",
        )
    return entries


def _read(file: str) -> str:
    """A file with bearers; the descriptor that is looked at is the one that is read."""
    from ingero.config.acl import check_token_mode
    from ingero.config.environment import allows_loose_tokens

    try:
        with Path(file).open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            check_token_mode(file, mode, allows_loose=allows_loose_tokens())
            return opened.read()
    except OSError as error:
        raise ConfigError([ConfigProblem("", error.strerror or str(error))], source=file) from error
    except UnicodeDecodeError as error:
        raise ConfigError([ConfigProblem("", "not UTF-8")], source=file) from error


@click.command("serve")
@_with_options
@click.option(
    "--log-format", type=click.Choice(["console", "json"]), default="console", show_default=True
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warn", "error"]),
    default="info",
    show_default=True,
)
def serve(log_format: str, log_level: str, **options: OptionValue) -> int:
    r"""Take OTLP, keep it, and answer over MCP and HTTP until SIGTERM.

    SIGHUP reads tokens and certificates again; bad ones leave the old in place. The audit log, one line per request,
    is on standard error.

    \b
    Examples:
      ingero-echo serve --insecure-no-tls --db echo.db --auth-token-file token
      ingero-echo serve --tls-cert cert.pem --tls-key key.pem --bearer-acl-file acl.yaml --mcp-addr 0.0.0.0:8081
      curl -H "Authorization: Bearer $(cat token)" http://127.0.0.1:8081/api/v2/tools/list
    """
    token = _text(options.pop("auth_token"))
    config = _load(options)
    load_tokens = _token_loader(config, token)
    import asyncio

    import uvloop

    from ingero.echo.service.app import EchoService
    from ingero.echo.service.listeners import Addresses
    from ingero.serving.ready import report_ready
    from ingero.telemetry.log import set_up_logging

    set_up_logging(log_level, log_format)
    service = EchoService(config, load_tokens)

    def say(at: Addresses) -> None:
        click.echo(
            f"ingero-echo: OTLP/gRPC {at.otlp_grpc}, OTLP/HTTP {at.otlp_http}, MCP and API {at.mcp}, "
            f"health {at.health}, database {service.store.path}"
        )
        sys.stdout.flush()
        report_ready(
            "ingero-echo",
            {name: getattr(at, name) for name in ("otlp_grpc", "otlp_http", "mcp", "health")},
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(service.run(say))


@click.command("mcp")
@click.option(
    "--db",
    "--db-path",
    "db",
    default="~/.ingero/echo.db",
    show_default=True,
    help="The database file.",
)
@click.option("--cluster", "clusters", multiple=True, help="Answer about these clusters only.")
@with_key
def mcp(
    db: str, clusters: tuple[str, ...], db_key_file: str | None, httpfs_extension: str | None
) -> None:
    r"""Speak MCP on standard input and output, over a database that nobody serves.

    The file is only read, and several may read it at once: a backup will do, also on a disk that cannot be written.
    Beside a running `serve`, point the assistant at its /mcp instead: it has its file for itself.

    \b
    Examples:
      ingero-echo mcp --db echo.db
      ingero-echo mcp --db echo.db --cluster train-1
    """
    import asyncio

    try:
        from ingero.echo.db.engine import check_there
        from ingero.echo.service.stdio import serve_stdio
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"this installation has no {missing.name}", hint="pip install 'ingero[echo]'"
        ) from missing
    check_there(Path(db).expanduser())  # a new file would hold nothing that anybody asks for
    asyncio.run(serve_stdio(db, frozenset(clusters) or None, db_key_file, httpfs_extension))


@click.command("validate")
@_with_options
def validate(**options: OptionValue) -> None:
    r"""Check settings, tokens and keys without starting; every problem is listed with its line.

    \b
    Examples:
      ingero-echo validate --config echo.yaml
      ingero-echo validate --insecure-no-tls --bearer-acl-file acl.yaml
    """
    token = _text(options.pop("auth_token"))
    config = _load(options)
    entries = _token_loader(config, token)()
    if config.store_password_file is not None:
        from ingero.echo.service.settings import build_clickhouse

        build_clickhouse(config)
    if config.tls_key is not None and config.tls_cert is not None:
        from ingero.config.tls import TlsServerConfig, check_key_mode
        from ingero.serving.tls import build_server_context

        check_key_mode(config.tls_key)
        build_server_context(TlsServerConfig(cert_file=config.tls_cert, key_file=config.tls_key))
    if config.db_key_file is not None:
        from ingero.echo.db.encryption import build_encryption, check_encryption

        encryption = build_encryption(config.db_key_file, config.httpfs_extension)
        assert encryption is not None
        check_encryption(encryption)
    click.echo(f"valid: {len(entries)} bearer{'s' if len(entries) != 1 else ''}")


@click.command("config")
@click.option(
    "--defaults", is_flag=True, required=True, help="Print every setting with its default."
)
def config(*, defaults: bool) -> None:
    r"""Print every key of the settings file, its default, and what it does.

    \b
    Examples:
      ingero-echo config --defaults > echo.yaml
    """
    assert defaults
    from ingero.config.describe import write_commented
    from ingero.echo.service.config import EchoConfig

    for line in write_commented(EchoConfig, {}, ""):
        click.echo(line)
