"""The client's errors become ours here, and nowhere else; and one connection is made like another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import clickhouse_connect
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError, DatabaseError, OperationalError

from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.errors import BrokenInstanceError, DeadlineError
from ingero.errors import StoreError

_TIMEOUT: Final = 159  # TIMEOUT_EXCEEDED
_CANCELLED: Final = 394  # QUERY_WAS_CANCELLED
_MEMORY: Final = 241  # MEMORY_LIMIT_EXCEEDED


def connect(settings: ClickHouseSettings) -> Client:
    """A client without a session, which threads may share.

    Raises:
        StoreError: The server cannot be reached or does not let us in.
    """
    if settings.is_embedded:
        where: dict[str, Any] = {"interface": "chdb"}  # without sessions anyway
    else:
        where = {
            "host": settings.host,
            "port": settings.port,
            "username": settings.user,
            "password": settings.password,
            "interface": "https" if settings.is_tls else "http",
            "ca_cert": settings.ca_file,
            "autogenerate_session_id": False,
            "connect_timeout": settings.connect_timeout_s,
            "send_receive_timeout": settings.write_timeout_s,
        }
    with translate_errors(f"connect to ClickHouse at {settings.host}:{settings.port}"):
        return clickhouse_connect.get_client(**where, database=settings.database)


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn whatever the client raises into a `StoreError`; ``doing`` completes "cannot …"."""
    try:
        yield
    except DatabaseError as error:
        code = error.code
        if code in {_TIMEOUT, _CANCELLED}:
            raise DeadlineError(f"cannot {doing}: stopped at its deadline") from error
        if code is None or isinstance(error, OperationalError):
            raise BrokenInstanceError(f"cannot {doing}: {_first_line(error)}") from error
        hint = "Narrow the time window." if code == _MEMORY else ""
        raise StoreError(f"cannot {doing}: {_first_line(error)}", hint=hint) from error
    except (ClickHouseError, OSError) as error:
        raise BrokenInstanceError(f"cannot {doing}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
