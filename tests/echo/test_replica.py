"""A second Echo answers from the backups of the first, and follows them."""

import datetime as dt
import json

import pytest
from tests.echo.process import metrics, point
from tests.echo.service.conftest import ALL, ask, bearers, sql
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.model import parse_model
from ingero.echo.db.backup_names import list_backups, name_backup
from ingero.echo.db.backups import BackupPlan, BackupSchedule
from ingero.echo.service.config import EchoConfig
from ingero.errors import ConfigError, StoreError
from ingero.telemetry.clock import SystemClock

LATER = dt.datetime(2099, 1, 1, tzinfo=dt.UTC)


def push(echo, n, name):
    document = metrics([point(rank=i) for i in range(n)], cluster="c1", name=name)
    return local_http.post(
        f"http://127.0.0.1:{echo.at.otlp_http.port}/v1/metrics",
        content=json.dumps(document),
        headers={"authorization": f"Bearer {ALL}", "content-type": "application/json"},
        timeout=120,
    )


def count(echo):
    return sql(echo, "SELECT count(*) FROM events").json()["rows"][0][0]


class LaterClock(SystemClock):
    """Now and then an hour later, so that backups have different names."""

    hours = 0

    def wall_ns(self):
        return super().wall_ns() + self.hours * 3600 * 10**9


@pytest.fixture
def site(tmp_path):
    """The Echo that writes, what makes a backup of it now, and the folder."""
    folder, clock = tmp_path / "backups", LaterClock()
    with RunningEcho(tmp_path / "echo.db", bearers(), {"rate_per_second": 1000}) as echo:
        schedule = BackupSchedule(echo.service.store, BackupPlan(folder, 1, 2), None, clock)

        def back_up():
            clock.hours += 1
            schedule.run_if_due()
            return list_backups(folder)[-1]

        yield echo, back_up, folder


def follow(echo):
    """What the writer's thread does each minute."""
    store = echo.service.store
    store.call(lambda backend: None)  # refused: there is no connection to give
    store._writer.upkeep._next_ns = 0
    with pytest.raises(StoreError):
        store.call(lambda backend: None).result()
    with pytest.raises(StoreError):
        store.call(lambda backend: None).result()


def test_a_replica_answers_from_the_newest_backup_follows_it_and_takes_nothing(site, tmp_path):
    echo, back_up, folder = site
    assert push(echo, 10, "m").status_code == 200
    back_up()
    assert push(echo, 5, "n").status_code == 200
    with RunningEcho(tmp_path / "unused.db", bearers(), {"replica_of": str(folder)}) as replica:
        assert count(replica) == 10
        refused = push(replica, 3, "o")
        assert (refused.status_code, "answers from backups" in refused.text) == (403, True)
        assert (
            local_http.get(f"http://127.0.0.1:{replica.at.health.port}/readyz").status_code == 200
        )
        shown = [back_up()]
        follow(replica)
        assert count(replica) == 15
        assert ask(replica, "fleet.cluster.summary").status_code == 200
        text = local_http.get(
            f"{replica.url}/metrics", headers={"authorization": f"Bearer {ALL}"}
        ).text
        (line,) = (
            one for one in text.splitlines() if one.startswith("ingero_echo_replica_timestamp")
        )
        assert float(line.split()[1]) == replica.service.store.backend.made_wall_s > 0
        assert push(echo, 5, "p").status_code == 200
        shown.append(back_up())  # the one that was answered from first is gone by now
        assert list_backups(folder) == shown
        follow(replica)
        assert count(replica) == 20
    assert not (tmp_path / "unused.db").exists()


def test_a_backup_that_cannot_be_opened_leaves_the_one_before(site, tmp_path, caplog):
    echo, back_up, folder = site
    assert push(echo, 10, "m").status_code == 200
    back_up()
    with RunningEcho(tmp_path / "unused.db", bearers(), {"replica_of": str(folder)}) as replica:
        name_backup(folder, LATER).write_bytes(b"no database")
        follow(replica)
        follow(replica)
        assert caplog.text.count("is not answered from") == 1
        assert count(replica) == 10
    with RunningEcho(tmp_path / "unused.db", bearers(), {"replica_of": str(folder)}) as replica:
        assert caplog.text.count("is not answered from") == 2
        follow(replica)
        assert count(replica) == 10
        back_up()
        follow(replica)
        assert push(echo, 5, "n").status_code == 200
        back_up()
        follow(replica)
        assert count(replica) == 15
        assert caplog.text.count("is not answered from") == 2
    for backup in list_backups(folder):
        backup.write_bytes(b"no database")
    with (
        pytest.raises(StoreError),
        RunningEcho(tmp_path / "unused.db", bearers(), {"replica_of": str(folder)}),
    ):
        pass


def test_a_folder_without_a_backup_and_settings_that_contradict_it_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no backup yet"):
        RunningEcho(tmp_path / "x.db", bearers(), {"replica_of": str(tmp_path)}).__enter__()
    with pytest.raises(ConfigError, match="replica_of and backup_dir exclude"):
        parse_model(EchoConfig, {"insecure_no_tls": True, "replica_of": "a", "backup_dir": "b"})
