"""An open store."""

import pytest
from tests.echo.db.stores import make_store


@pytest.fixture
def store(tmp_path):
    opened = make_store(tmp_path / "echo.db")
    opened.open()
    yield opened
    opened.close()
