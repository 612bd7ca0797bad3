"""A running sandbox, shared by the tests of a module."""

import pytest

from ingero.echo.db.sandbox.runner import Sandbox, SandboxSettings
from ingero.echo.schema.tables import TENANT_TABLES
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S


@pytest.fixture(scope="module")
def sandbox():
    settings = SandboxSettings(n_workers=2, timeout_ns=4 * NS_PER_S, memory_bytes=512 << 20)
    opened = Sandbox(settings, TENANT_TABLES, SystemClock())
    opened.start()
    yield opened
    opened.close()
