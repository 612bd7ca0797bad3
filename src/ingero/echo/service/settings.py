"""What the parts of Echo are given, from what a user wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ingero.echo.db.backups import BackupPlan, BackupSchedule
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.compaction import Compactor
from ingero.echo.db.duckdb_backend import DuckDbBackend
from ingero.echo.db.encryption import build_encryption
from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.retention import Retention
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.ingest.limits import RecordLimits
from ingero.echo.ingest.settings import IngestSettings
from ingero.echo.service.config import EchoConfig, parse_store
from ingero.errors import ConfigError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S


def build_store(config: EchoConfig, clock: Clock, *, is_read_only: bool = False) -> Store:
    """The store that these settings describe, not yet open.

    Args:
        config: What a user wrote.
        clock: Time.
        is_read_only: Nothing changes the file, and others may read it meanwhile.

    Raises:
        ConfigError: The password's file cannot be read.
    """
    settings = StoreSettings(
        engine=DatabaseSettings(
            memory_limit_bytes=config.memory_limit,
            threads=config.threads,
            encryption=build_encryption(config.db_key_file, config.httpfs_extension),
            is_read_only=is_read_only,
        ),
        clickhouse=build_clickhouse(config),
        replica_of=_find_folder(config.replica_of),
        writer=DatabaseWriterSettings(
            group_ns=_group_ns(config),
            window_ns=config.dedupe_window,
            retention=Retention(
                config.retention or None,
                config.max_db_size or None,
                {name: age or None for name, age in config.table_retention.items()},
            ),
            is_clock_trusted=config.trust_clock,
        ),
        min_free_bytes=config.min_free_space,
    )
    path = config.store or config.replica_of or str(Path(config.db).expanduser())
    return Store(path, settings, clock)


def _find_folder(given: str | None) -> Path | None:
    return None if given is None else Path(given).expanduser()


def _group_ns(config: EchoConfig) -> int:
    """The user's, else one insert a second where a server makes a part of each insert and merges parts later."""
    if config.store is None or "group_commit" in config.model_fields_set:
        return config.group_commit
    return NS_PER_S


def build_clickhouse(config: EchoConfig) -> ClickHouseSettings | None:
    """What is needed to reach the server, or None where a file is the store.

    Raises:
        ConfigError: The password's file cannot be read.
    """
    if config.store is None:
        return None
    password = ""
    if config.store_password_file is not None:
        try:
            password = Path(config.store_password_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{config.store_password_file}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"{config.store_password_file}: is not UTF-8") from None
    return replace(parse_store(config.store), password=password, ca_file=config.store_ca_file)


def build_backups(config: EchoConfig, store: Store, clock: Clock) -> BackupSchedule | None:
    """The schedule of backups, where there is one."""
    if config.backup_dir is None:
        return None
    folder = Path(config.backup_dir).expanduser()
    plan = BackupPlan(folder, config.backup_interval, config.backup_keep)
    encryption = build_encryption(config.db_key_file, config.httpfs_extension)
    return BackupSchedule(store, plan, encryption, clock)


def build_compactor(config: EchoConfig, store: Store) -> Compactor | None:
    """What makes the file smaller, where there is one and that is wanted; an encrypted one keeps its size."""
    backend = store.backend
    is_wanted = store.is_file and config.shrink_above and not config.db_key_file
    if not isinstance(backend, DuckDbBackend) or not is_wanted:
        return None
    return Compactor(store, backend, config.shrink_above)


def build_ingest(config: EchoConfig) -> IngestSettings:
    """How much a sender may send."""
    return IngestSettings(
        max_body_bytes=config.max_otlp_body,
        max_in_flight_bytes=config.otlp_memory,
        per_second=config.otlp_rate_per_second,
        burst=config.otlp_rate_burst,
        max_in_flight_bearer=config.otlp_max_in_flight,
        trust_proxy=config.trust_proxy_headers,
        is_read_only=config.replica_of is not None,
        records=RecordLimits(
            n_attributes=config.max_attributes,
            value_chars=config.max_attribute_length,
            attributes_bytes=config.max_attributes_size,
            record_bytes=config.max_log_record,
        ),
    )
