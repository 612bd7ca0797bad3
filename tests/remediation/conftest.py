import pytest
from tests.remediation.receiver import Receiver
from tests.remediation.site import Site, build_config


@pytest.fixture
def site(tmp_path):
    """Of a policy that acts by itself."""
    return Site(tmp_path / "journal.db", build_config())


@pytest.fixture
def receiver():
    """A receiver of requests."""
    one = Receiver()
    yield one
    one.close()
