"""No test waits for operations that end after a look."""

import pytest


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("ingero.agent.diagnosis.examiner.SETTLE_S", 0.0)
