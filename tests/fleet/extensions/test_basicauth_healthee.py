"""Names with passwords, and the pages of healthee, asked as their users ask them."""

import asyncio
import base64
import time

import bcrypt
import pytest
from tests.support import local_http

from ingero.config import parse_model
from ingero.errors import ConfigError, IngeroError, RetryableError
from ingero.fleet.component import (
    Authenticator,
    ComponentId,
)
from ingero.fleet.extensions import basicauth, healthee, zpages
from ingero.fleet.views import (
    DeliveryState,
    DeliveryView,
    PipelineView,
    ScrapeState,
    ScrapeView,
    ServiceStatus,
    ServiceView,
)
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S


def line(name, password):
    return f"{name}:{bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()}\n"


def basic(name, password):
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def open_auth(settings):
    host = ManualHost()
    config = parse_model(basicauth.BasicAuthConfig, settings)
    auth = basicauth.FACTORY.create(ComponentId("basicauth"), config)
    asyncio.run(auth.start(host))
    return auth, host


def test_right_password_has_its_user_as_subject_and_wrong_ones_are_counted():
    auth, host = open_auth({"htpasswd": {"inline": line("ann", "p:w") + line("bob", "b")}})
    assert auth.authenticate(basic("ann", "p:w")) == "user:ann"
    assert auth.authenticate(basic("ann", "p:w").replace("Basic", "basic")) == "user:ann"
    wrong = (
        *(basic("ann", "b"), basic("eve", "b"), basic("eve", "p:w"), basic("ann", "")),
        *("Basic %%%", "Basic YW5u", "Bearer x", "", "Basic \udcff", basic("ann", "x" * 100)),
        basic("ann", "p:w").replace("Basic", "Bearer"),
    )
    assert [auth.authenticate(one) for one in wrong] == [None] * len(wrong)
    assert auth.authenticate(None) is None
    name = "ingero_fleet_auth_refused_total"
    assert host.read(name, extension="basicauth", reason="wrong") == len(wrong)
    assert host.read(name, extension="basicauth", reason="missing") == 1


def test_a_password_is_hashed_once_for_all_pushes(monkeypatch):
    auth, _ = open_auth({"htpasswd": {"inline": line("ann", "pw")}})
    calls, check = [], bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda *args: calls.append(1) or check(*args))
    given = [basic("ann", "pw"), basic("ann", "no")]
    assert [auth.authenticate(one) for one in given * 5] == ["user:ann", None] * 5
    assert len(calls) == 2


def test_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path):
    file = tmp_path / "htpasswd"
    file.write_text(line("ann", "old"))
    auth, host = open_auth({"htpasswd": {"file": str(file), "inline": line("root", "r")}})
    assert auth.authenticate(basic("ann", "old")) == "user:ann"
    file.write_text("# people\n\n" + line("ann", "new"))
    host.advance(5 * NS_PER_S)
    assert auth.authenticate(basic("ann", "old")) is None
    assert auth.authenticate(basic("ann", "new")) == "user:ann"
    file.write_text("ann:$apr1$x$y\n")
    host.advance(5 * NS_PER_S)
    assert auth.authenticate(basic("ann", "new")) == "user:ann"
    assert auth.authenticate(basic("root", "r")) == "user:root"


def test_a_changed_line_leaves_the_credentials_of_others_known(tmp_path, monkeypatch):
    file = tmp_path / "htpasswd"
    bob = line("bob", "b")
    file.write_text(line("ann", "old") + bob)
    auth, host = open_auth({"htpasswd": {"file": str(file)}})
    given = [basic("ann", "old"), basic("bob", "b"), basic("bob", "no"), basic("eve", "e")]
    assert [auth.authenticate(one) for one in given] == ["user:ann", "user:bob", None, None]
    file.write_text(line("ann", "new") + bob + line("eve", "e"))
    host.advance(5 * NS_PER_S)
    calls, check = [], bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda *args: calls.append(args[0]) or check(*args))
    assert [auth.authenticate(one) for one in given] == [None, "user:bob", None, "user:eve"]
    assert calls == [b"old", b"e"]
    file.write_text(line("eve", "e"))
    host.advance(5 * NS_PER_S)
    assert auth.authenticate(given[1]) is None


def test_checks_take_a_fifth_of_a_core_and_known_credentials_do_not_wait():
    slow = bcrypt.hashpw(b"pw", bcrypt.gensalt(10)).decode()
    auth, host = open_auth({"htpasswd": {"inline": f"ann:{slow}\n{line('bob', 'b')}"}})
    assert auth.authenticate(basic("bob", "b")) == "user:bob"

    name = "ingero_fleet_auth_refused_total"

    def check_many():
        return [auth.authenticate(basic("ann", f"wrong{number}")) for number in range(1000)]

    before_ns = time.thread_time_ns()
    with pytest.raises(RetryableError) as refused:
        check_many()
    assert host.read(name, extension="basicauth", reason="wrong") > 0
    assert time.thread_time_ns() - before_ns < 2 * NS_PER_S
    assert 0 < refused.value.retry_after_ns < 5 * NS_PER_S
    with pytest.raises(RetryableError):
        auth.authenticate(basic("ann", "pw"))
    for _ in range(100):
        assert auth.authenticate(basic("bob", "b")) == "user:bob"
        assert auth.authenticate(basic("ann", "wrong0")) is None
        assert auth.authenticate("Basic %%%") is None
    host.advance(NS_PER_S)
    assert auth.authenticate(basic("ann", "pw")) == "user:ann"
    assert host.read(name, extension="basicauth", reason="unchecked") == 2


def test_wrong_credentials_do_not_push_out_right_ones_and_are_bounded(monkeypatch):
    monkeypatch.setattr(basicauth, "_MAX_WRONG", 5)
    auth, _ = open_auth({"htpasswd": {"inline": line("ann", "pw")}})
    assert auth.authenticate(basic("ann", "pw")) == "user:ann"
    for number in range(20):
        assert auth.authenticate(basic("ann", f"no{number}")) is None
    assert len(auth._wrong) == 5
    calls, check = [], bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda *args: calls.append(1) or check(*args))
    assert auth.authenticate(basic("ann", "pw")) == "user:ann"
    assert auth.authenticate(basic("ann", "no19")) is None
    assert calls == []
    kept = repr([*auth._right.items(), *auth._wrong.items()])
    assert "no19" not in kept
    assert "pw" not in kept


@pytest.mark.parametrize(
    "text", ["ann:secret", "ann:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=", "ann", ":x"]
)
def test_other_hashes_are_refused_at_the_start_without_being_shown(text):
    with pytest.raises(ConfigError, match=r"line 1: .* has no bcrypt hash") as raised:
        open_auth({"htpasswd": {"inline": text}})
    assert "secret" not in str(raised.value)


def test_client_sends_name_and_password_from_settings_or_files(tmp_path):
    auth, _ = open_auth({"client_auth": {"username": "f", "password": "p"}})
    assert auth.client_headers() == {"Authorization": basic("f", "p")}
    (tmp_path / "p").write_text("p1\n")
    auth, host = open_auth({"client_auth": {"username": "f", "password_file": str(tmp_path / "p")}})
    assert auth.client_headers() == {"Authorization": basic("f", "p1")}
    (tmp_path / "p").write_text("p2")
    host.advance(5 * NS_PER_S)
    assert auth.client_headers() == {"Authorization": basic("f", "p2")}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"htpasswd": {}},
        {"htpasswd": {"inline": "a:b"}, "client_auth": {"username": "f", "password": "p"}},
        {"client_auth": {"username": "f"}},
        {"client_auth": {"username": "a:b", "password": "p"}},
    ],
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        parse_model(basicauth.BasicAuthConfig, settings)


def test_missing_file_is_found_by_validate_too(tmp_path):
    settings = {"htpasswd": {"file": str(tmp_path / "no")}}
    with pytest.raises(IngeroError, match="No such file"):
        basicauth.FACTORY.check_files(parse_model(basicauth.BasicAuthConfig, settings))


class View:
    """A `ServiceView` and a `DeliveryView` that say what a test wants."""

    def __init__(self, status=ServiceStatus.RUNNING):
        self.status = status
        self.started_wall_ns = 1_767_225_500_000_000_000
        self.config_source = "fleet.yaml"

    def components(self):
        return []

    def pipelines(self):
        return [PipelineView("logs", ("otlp",), (), ("otlp/up",), 7, (1.0,), (7, 0), ((0, "no"),))]

    def read_state(self):
        return DeliveryState(
            "otlp/up", 3, 10, 12.5, n_sent=9, n_retries=4, n_dropped=2,
            last_error="<refused>", last_error_unix_s=1_767_225_590.25,
        )  # fmt: skip


class Scraped:
    """A `ScrapeView` that nobody came to."""

    def read_state(self):
        return ScrapeState("prometheus", 70, 8, 40.0, 15.0)


class Auth:
    """Knows one token."""

    def authenticate(self, authorization):
        if authorization == "Bearer later":
            raise RetryableError("too many new credentials at once")
        return "token:x" if authorization == "Bearer right" else None


def ask(factory, settings, requests, status=ServiceStatus.RUNNING):
    host = ManualHost()
    view = View(status)
    host.offer(ServiceView, view)

    async def scenario():
        config = parse_model(factory.config, {"endpoint": "127.0.0.1:0", **settings})
        extension = factory.create(ComponentId(factory.type), config)
        await extension.start(host)
        host.offer_as(ComponentId("bearertokenauth"), Authenticator, Auth())  # starts later
        host.offer(DeliveryView, view)
        host.offer(ScrapeView, Scraped())
        async with local_http.open_async_client(base_url=f"http://{host.announced['']}") as client:
            answers = [await client.get(path, headers=headers) for path, headers in requests]
        await extension.stop()
        return answers

    return asyncio.run(scenario())


BEARER = {"auth": {"authenticator": "bearertokenauth"}}
STATE = "/internal/ee/state"


def test_probe_is_open_and_says_whether_data_is_taken():
    for status, code in ((ServiceStatus.RUNNING, 200), (ServiceStatus.DRAINING, 503)):
        (answer,) = ask(healthee.FACTORY, {}, [("/healthz/ee", {})], status)
        assert (answer.status_code, answer.json()) == (code, {"status": status.value})


def test_state_needs_the_right_token_and_shows_everything():
    asked = [
        (STATE, {}),
        (STATE, {"authorization": "Bearer no"}),
        (STATE, {"authorization": "Bearer later"}),
        (STATE, {"authorization": "Bearer right"}),
    ]
    none, wrong, later, right = ask(healthee.FACTORY, BEARER, asked)
    assert [one.status_code for one in (none, wrong, later, right)] == [401, 401, 503, 200]
    assert none.headers["www-authenticate"] == "Bearer"
    body = right.json()
    assert (body["status"], body["schema_version"], body["uptime_s"]) == ("running", 1, 100.0)
    assert body["pipelines"][0]["batches"] == 7
    assert body["pipelines"][0]["refusals"] == [{"unix_s": 0.0, "error": "no"}]
    assert body["exporters"] == [
        {
            "exporter": "otlp/up", "n_waiting": 3, "capacity": 10, "away_s": 12.5, "refused_s": None, "n_sent": 9,
            "n_retries": 4, "n_dropped": 2, "last_error": "<refused>", "last_error_unix_s": 1_767_225_590.25,
        }
    ]  # fmt: skip
    assert body["scraped"] == [
        {
            "exporter": "prometheus",
            "n_series": 70,
            "n_scrapes": 8,
            "since_s": 40.0,
            "interval_s": 15.0,
        }
    ]
    assert body["degraded"] == [
        "exporters.otlp/up: its destination has taken nothing for 12.5 s: <refused>",
        "exporters.prometheus: nobody has scraped it for 40.0 s, and it was scraped every 15.0 s",
    ]


def test_state_without_a_check_is_not_served_and_an_unknown_check_lets_nobody_in():
    (closed,) = ask(healthee.FACTORY, {}, [(STATE, {"authorization": "Bearer right"})])
    assert (closed.status_code, "auth" in closed.json()["error"]) == (404, True)
    other = {"auth": {"authenticator": "basicauth"}}
    (broken,) = ask(healthee.FACTORY, other, [(STATE, {"authorization": "Bearer right"})])
    assert broken.status_code == 500


def test_zpages_show_what_waits_for_whom():
    (page,) = ask(zpages.FACTORY, {}, [("/debug/exporterz", {})])
    row = "<td>otlp/up</td><td>3 of 10</td><td>9</td><td>4</td><td>2</td><td>its destination has taken nothing"
    assert row in page.text
    assert "<td>2025-12-31T23:59:50+00:00</td><td>&lt;refused&gt;</td>" in page.text
    assert "<td>prometheus</td><td>70</td><td>8</td><td>40.0 s ago</td><td>15.0 s</td><td>nobody" in page.text  # fmt: skip
