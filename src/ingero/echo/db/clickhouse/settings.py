"""Where the server is. No import of its client: the store has this type without it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClickHouseSettings:
    """One database on one server.

    Attributes:
        host: Its name.
        port: Of its HTTP interface.
        user: Who we are there; may create tables, insert, select and delete in the database.
        password: Of the user.
        database: Must exist.
        is_tls: HTTPS; the server's certificate is checked.
        ca_file: PEM file of the authorities to check it against; None is the client's own list.
        connect_timeout_s: Longest wait for a connection.
        write_timeout_s: Longest insert.
        is_embedded: The engine in this process (chdb) instead of a server; for tests.
    """

    host: str
    port: int
    user: str = "default"
    password: str = field(default="", repr=False)
    database: str = "default"
    is_tls: bool = False
    ca_file: str | None = None
    connect_timeout_s: int = 10
    write_timeout_s: int = 60
    is_embedded: bool = False
