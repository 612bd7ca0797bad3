"""Settings of ``ingero-echo``: every flag and every key of its file."""

from __future__ import annotations

from typing import Final, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ingero.config.model import StrictModel
from ingero.config.types import Duration, Endpoint, Size
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.schema.tables import TABLES
from ingero.serving.oauth import check_urls
from ingero.units import parse_duration, parse_size

_PORTS: Final = {"clickhouse": 8123, "clickhouses": 8443}


def parse_store(url: str) -> ClickHouseSettings:
    """Where a store's URL points; without the password.

    Raises:
        ValueError: It is no such URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("store is not clickhouses://USER@HOST:PORT/DATABASE")
    if parts.password is not None:
        raise ValueError(
            "store has a password, which others on this machine see; use store_password_file"
        )
    if parts.query or parts.fragment or "/" in parts.path.strip("/"):
        raise ValueError("store has more than a user, a host, a port and a database")
    endpoint = Endpoint(parts.hostname, parts.port or _PORTS[parts.scheme])
    is_tls = parts.scheme == "clickhouses"
    if not is_tls and not endpoint.is_loopback:
        raise ValueError(f"store {endpoint} is not loopback; use clickhouses://, with TLS")
    return ClickHouseSettings(
        host=endpoint.host,
        port=endpoint.port,
        user=parts.username or "default",
        database=parts.path.strip("/") or "default",
        is_tls=is_tls,
    )


class EchoConfig(StrictModel):
    """What a user writes; flags are the same keys with dashes."""

    otlp_addr: Endpoint = Field(
        Endpoint("127.0.0.1", 4317), description="Where OTLP/gRPC is taken."
    )
    otlp_http_addr: Endpoint = Field(
        Endpoint("127.0.0.1", 4318), description="Where OTLP/HTTP is taken."
    )
    mcp_addr: Endpoint = Field(
        Endpoint("127.0.0.1", 8081), description="Where MCP and the HTTP API are served."
    )
    health_addr: Endpoint = Field(
        Endpoint("127.0.0.1", 8080), description="Where /healthz is served, without TLS or bearer."
    )
    db: str = Field("~/.ingero/echo.db", description="The database file.")
    db_key_file: str | None = Field(
        None,
        description="File with the key that encrypts the database file: 32 bytes, raw or in base64; mode 0600.",
    )
    httpfs_extension: str | None = Field(
        None,
        description="DuckDB's httpfs.duckdb_extension of the installed release, which db_key_file needs.",
    )
    store: str | None = Field(
        None,
        description="Rows on a ClickHouse server instead of the file: clickhouses://USER@HOST:PORT/DATABASE, "
        "or clickhouse:// without TLS on loopback.",
    )
    store_password_file: str | None = Field(
        None, description="File with the password of that user."
    )
    store_ca_file: str | None = Field(
        None, description="PEM file of the authorities that sign the server's certificate."
    )
    replica_of: str | None = Field(
        None,
        description="The backup_dir of another Echo: its newest backup is answered from, and nothing is taken.",
    )
    auth_token_file: str | None = Field(
        None, description="File with one bearer token that may touch every cluster."
    )
    bearer_acl_file: str | None = Field(
        None, description="File with a list of bearers and their clusters; YAML or JSON."
    )
    acl_empty_means_all: bool = Field(
        default=False, description="Read an empty allowed_clusters as every cluster."
    )
    oauth_issuer: str | None = Field(
        None,
        description="URL of an OAuth authorization server whose access tokens are taken, too, at mcp_addr.",
    )
    oauth_resource: str | None = Field(
        None,
        description="URL of MCP as clients know it, such as https://echo.example:8081/mcp: the audience of tokens.",
    )
    oauth_jwks_file: str | None = Field(
        None, description="File with that server's public keys (a JWK set), read again at SIGHUP."
    )
    oauth_clusters_claim: str = Field(
        "ingero_clusters",
        min_length=1,
        description="Claim of a token that lists its clusters; * is every one, none is no access.",
    )
    token_grace: Duration = Field(
        parse_duration("5m"), description="How long a token that was rotated out is still taken."
    )
    tls_cert: str | None = Field(None, description="PEM file of the certificate chain.")
    tls_key: str | None = Field(None, description="PEM file of the private key.")
    otlp_client_ca_file: str | None = Field(
        None,
        description="PEM file of authorities of clients: who sends OTLP must show a certificate of one of them, and "
        "is known by its name where it sends no token.",
    )
    insecure_no_tls: bool = Field(
        default=False, description="Serve without TLS; loopback addresses only."
    )
    trust_proxy_headers: bool = Field(
        default=False, description="Take the client's address from X-Forwarded-For."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host headers that MCP answers to, such as echo.example:*; on loopback its own names are added, "
        "elsewhere empty is any.",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="Origin headers of web pages that MCP answers to, such as https://tools.example; on loopback "
        "those of loopback are added, elsewhere empty is none.",
    )
    rate_per_second: float = Field(30, gt=0, description="Requests a second of one bearer.")
    rate_burst: int = Field(100, ge=1, description="Requests that a bearer may make at once.")
    max_in_flight: int = Field(16, ge=1, description="Requests of one bearer at once.")
    max_connections: int = Field(
        1024, ge=1, description="Connections of each HTTP listener; more are answered 503."
    )
    max_connections_per_peer: int = Field(
        256,
        ge=0,
        description="Of these, from one address; 0 is no limit, as with trust_proxy_headers.",
    )
    head_timeout: Duration = Field(
        parse_duration("10s"), description="Longest time for a request's head, or a TLS handshake."
    )
    body_timeout: Duration = Field(
        parse_duration("15s"), description="Longest time for a body of the API or MCP."
    )
    stall_timeout: Duration = Field(
        parse_duration("30s"), description="Longest time in which a client reads nothing."
    )
    max_body: Size = Field(parse_size("1MiB"), description="Largest request body of the API.")
    max_otlp_body: Size = Field(parse_size("32MiB"), description="Largest OTLP request.")
    otlp_rate_per_second: float = Field(
        1000, gt=0, description="OTLP requests a second of one bearer."
    )
    otlp_rate_burst: int = Field(
        2000, ge=1, description="OTLP requests that a bearer may make at once."
    )
    otlp_max_in_flight: int = Field(
        512, ge=1, description="OTLP requests of one bearer that wait for their commit."
    )
    otlp_memory: Size = Field(
        parse_size("512MiB"),
        description="OTLP bodies that are read and written at once; one bearer gets half at most.",
    )
    max_attributes: int = Field(
        128, ge=1, description="Attributes of a resource, a point, a record or a span."
    )
    max_attribute_length: int = Field(
        16384, ge=64, description="Characters of an attribute's text and of a span's name."
    )
    max_attributes_size: Size = Field(
        parse_size("64KiB"),
        description="All attributes of a resource, a point or a span together, as JSON.",
    )
    max_log_record: Size = Field(
        parse_size("1MiB"), description="Attributes of a log record together, and its body."
    )
    query_timeout: Duration = Field(parse_duration("10s"), description="Longest tool call.")
    sql_timeout: Duration = Field(parse_duration("10s"), description="Longest tenant statement.")
    sql_max_rows_in: int = Field(
        1_000_000, ge=1, description="Rows of each table that a tenant's statement sees at most."
    )
    sql_max_bytes_in: Size = Field(
        parse_size("256MiB"),
        description="Bytes of rows that a tenant's statement is given at most, all tables together.",
    )
    sql_memory: Size = Field(
        parse_size("1GiB"), description="Memory of a tenant's statement, all of its process."
    )
    sql_workers: int = Field(
        4,
        ge=1,
        le=64,
        description="Tenant statements at once; one tenant has a quarter of the places at most.",
    )
    readers: int = Field(
        4, ge=1, le=64, description="Tool calls at once; one tenant has half of the places at most."
    )
    queue_timeout: Duration = Field(
        parse_duration("10s"), description="Longest wait of a question for its place."
    )
    group_commit: Duration = Field(
        parse_duration("50ms"),
        description="Longest wait for company before a commit; with store 1s unless given.",
    )
    dedupe_window: Duration = Field(
        parse_duration("10m"), description="How long a sender's retry is recognised."
    )
    retention: Duration = Field(
        parse_duration("720h"), description="Age at which rows are deleted; 0s keeps them."
    )
    table_retention: dict[str, Duration] = Field(
        default={},
        description="Another age for some tables, such as {events: 72h, verdicts: 8760h}; 0s keeps their rows.",
    )
    trust_clock: bool = Field(
        default=False,
        description="Retention believes this machine's clock at once, however far it is ahead of what the database "
        "last saw; for one start.",
    )
    max_db_size: Size = Field(
        0, description="Size above which the oldest rows are deleted; 0 is no limit."
    )
    min_free_space: Size = Field(
        parse_size("512MiB"), description="Free disk space below which ingest stops."
    )
    backup_dir: str | None = Field(
        None, description="Folder where backups are made while serving; none are made without."
    )
    backup_interval: Duration = Field(
        parse_duration("24h"), description="From one of these backups to the next."
    )
    backup_keep: int = Field(
        7, ge=1, le=1000, description="The newest backups that are kept in backup_dir."
    )
    shrink_above: Size = Field(
        parse_size("1GiB"),
        description="Bytes in no use above which the file is written anew while serving, where they are half of it or "
        "more; 0 leaves it as large as it was.",
    )
    memory_limit: Size = Field(parse_size("1GiB"), description="Memory of the database itself.")
    threads: int = Field(2, ge=1, le=256, description="Threads of the database.")
    drain: Duration = Field(parse_duration("10s"), description="Time to finish at SIGTERM.")

    @field_validator("table_retention")
    @classmethod
    def _check_tables(cls, value: dict[str, int]) -> dict[str, int]:
        for name in value:
            if name not in TABLES:
                raise ValueError(f"there is no table {name!r}; one of {', '.join(TABLES)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.auth_token_file and self.bearer_acl_file:
            raise ValueError("auth_token_file and bearer_acl_file exclude each other")
        if self.otlp_memory < 2 * self.max_otlp_body:
            raise ValueError("otlp_memory is less than two bodies of max_otlp_body")
        if self.max_db_size and self.max_db_size < parse_size("64MiB"):
            raise ValueError("max_db_size under 64MiB would delete what just arrived")
        if self.otlp_client_ca_file and self.tls_cert is None:
            raise ValueError("otlp_client_ca_file needs tls_cert and tls_key")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        if self.insecure_no_tls and self.tls_cert:
            raise ValueError("insecure_no_tls and tls_cert exclude each other")
        if self.insecure_no_tls:
            for name in ("otlp_addr", "otlp_http_addr", "mcp_addr"):
                endpoint = getattr(self, name)
                if not endpoint.is_loopback:
                    raise ValueError(
                        f"{name} {endpoint} is not loopback; insecure_no_tls is for trials on one machine"
                    )
        elif self.tls_cert is None:
            raise ValueError(
                "tls_cert and tls_key are missing; insecure_no_tls serves loopback without"
            )
        return self

    @model_validator(mode="after")
    def _check_backups(self) -> Self:
        if self.backup_interval < parse_duration("1m"):
            raise ValueError("backup_interval under 1m would have ingest wait all the time")
        if self.replica_of is not None:
            for name in ("store", "backup_dir", "db_key_file", "max_db_size"):
                if getattr(self, name):
                    raise ValueError(f"replica_of and {name} exclude each other")
        if self.backup_dir is not None and self.store is not None:
            raise ValueError(
                "backup_dir is for a file; what store keeps is its server's to back up"
            )
        return self

    @model_validator(mode="after")
    def _check_oauth(self) -> Self:
        issuer, resource = self.oauth_issuer, self.oauth_resource
        if (issuer is None) != (resource is None) or (issuer is None) != (
            self.oauth_jwks_file is None
        ):
            raise ValueError("oauth_issuer, oauth_resource and oauth_jwks_file belong together")
        wrong = check_urls(issuer, resource) if issuer and resource else ""
        if wrong:
            raise ValueError(f"oauth_{wrong}")
        return self

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        if self.store is not None:
            parse_store(self.store)
            if self.max_db_size:
                raise ValueError("max_db_size is of a file; the size of store is its server's")
        elif self.store_password_file or self.store_ca_file:
            raise ValueError("store_password_file and store_ca_file belong to store")
        return self

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        if (self.db_key_file is None) != (self.httpfs_extension is None):
            raise ValueError("db_key_file and httpfs_extension belong together")
        if self.db_key_file is not None and self.store is not None:
            raise ValueError(
                "db_key_file is of a file; what store keeps is its server's to encrypt"
            )
        return self
