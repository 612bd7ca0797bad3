"""A traced rank for each test that asks for one."""

import pytest
from tests.agent.collectives.traced_rank import Job


@pytest.fixture
def job():
    return Job()
