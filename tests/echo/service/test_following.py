"""Bearers follow their file without a signal, and no half of a file is ever taken."""

import asyncio
import time

import pytest
from tests.echo.service.conftest import ALL, ONE, TWO
from tests.echo.serving import ACL, Served

from ingero.config.acl import parse_acl
from ingero.config.model import parse_model
from ingero.echo.service import access as access_module
from ingero.echo.service.access import Access
from ingero.echo.service.config import EchoConfig
from ingero.telemetry.clock import SystemClock


@pytest.mark.slow
def test_a_token_that_is_revoked_in_the_file_is_refused_soon_without_a_signal_and_nobody_else(
    tmp_path,
):
    with Served(tmp_path) as echo:
        assert echo.get("/api/v2/whoami", ONE).status_code == 200
        lost = f"- {{key_name: team-one, token: {ONE}, revoked: true}}"
        kept = [line for line in ACL.strip().splitlines() if ONE not in line]
        echo.acl.write_text("\n".join([*kept, lost]))
        until = time.monotonic() + 30
        while echo.get("/api/v2/whoami", ONE).status_code != 401:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert echo.get("/api/v2/whoami", TWO).status_code == 200
        assert echo.get("/api/v2/whoami", ALL).status_code == 200
        assert any(line.get("event") == "bearer_rotation_applied" for line in echo.audit())


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """An `Access`, its file, and what runs while the file is followed, with the looks that it sees."""
    monkeypatch.setattr(access_module, "LOOK_S", 0.02)
    file = tmp_path / "acl.yaml"
    file.write_text(ACL)
    loads = []

    def load():
        loads.append(file.read_text())
        return parse_acl(loads[-1], str(file))

    config = parse_model(EchoConfig, {"insecure_no_tls": True, "bearer_acl_file": str(file)})
    access = Access(load, config, SystemClock())

    def run(steps):
        async def work():
            following = asyncio.create_task(access.follow())
            await asyncio.sleep(0.05)
            await steps()
            following.cancel()

        asyncio.run(work())

    return access, file, loads, run


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what is awaited is a file
            await asyncio.sleep(0.01)


def test_a_file_that_is_being_written_is_left_alone_until_it_is_still(followed):
    access, file, loads, run = followed

    async def steps():
        for number in range(200):  # a valid file at each moment, and half of what its writer wants
            with file.open("a") as opened:
                opened.write(
                    f"- {{key_name: k{number}, token: {'x' * 20}{number}, allowed_clusters: [c]}}\n"
                )
            await asyncio.sleep(0.001)
        await until(lambda: len(access.bearers.principals) == 204)

    run(steps)
    assert loads[-1] == file.read_text()
    assert (
        len(loads) <= 4
    )  # at the start, when it was still, and where this machine paused the writer


def test_a_bad_file_leaves_the_old_set_and_the_next_good_one_is_taken(followed, caplog):
    access, file, _, run = followed

    async def steps():
        file.write_text("- {key_name: half")
        await until(lambda: "not replaced" in caplog.text)
        assert access.authenticate(f"Bearer {ONE}") is not None
        file.unlink()
        await asyncio.sleep(0.1)  # gone, as between two steps of a replacement
        assert access.authenticate(f"Bearer {ONE}") is not None
        file.write_text(ACL.replace("team-one", "team-uno"))
        await until(lambda: access.authenticate(f"Bearer {ONE}").key_name == "team-uno")

    run(steps)
