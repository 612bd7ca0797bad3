"""A store in memory and an intake that writes to it."""

import pytest

from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.ingest.intake import Intake
from ingero.serving.bearer import Principal
from ingero.testing.clock import ManualClock

ANY = Principal("d", "k", None)


@pytest.fixture
def store():
    settings = StoreSettings(
        engine=DatabaseSettings(memory_limit_bytes=128 << 20, threads=1),
        writer=DatabaseWriterSettings(group_ns=1_000_000),
    )
    opened = Store(":memory:", settings, ManualClock())
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def take(store):
    intake = Intake(store, ManualClock())

    def take(export, principal=ANY, hint=""):
        built = intake.build(export, principal, hint)
        store.write(built.rows)
        return built

    return take
