"""A file with the token of `tests.echo.one_token`."""

import pytest
from tests.echo.one_token import TOKEN


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file
