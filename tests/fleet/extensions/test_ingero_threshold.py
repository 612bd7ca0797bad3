"""What agents and operators are told over real sockets."""

import asyncio
import ssl

import httpx
import pytest
import trustme
from tests.support import local_http

from ingero.config import parse_model
from ingero.errors import BadDataError, ConfigError
from ingero.fleet.component import (
    AdminRoute,
    AdminRoutes,
    ComponentId,
    PushAnswer,
    PushAnswerer,
    PushContext,
    ThresholdSource,
)
from ingero.fleet.extensions.ingero_threshold.admin import is_own_name
from ingero.fleet.extensions.ingero_threshold.config import IngeroThresholdConfig
from ingero.fleet.extensions.ingero_threshold.extension import FACTORY
from ingero.testing.host import ManualHost


class Source:
    """Knows one cluster, with one cohort and one node that differ."""

    def find_answer(self, cluster_id, cohort_hash="", node_id=None):
        if cluster_id != "prod a":
            return None
        if node_id == "special":
            return PushAnswer(0.5, quorum_met=True)
        return PushAnswer(0.7 if cohort_hash == "aa" else 0.870348, quorum_met=not cohort_hash)


class Pages:
    def admin_routes(self):
        return (
            AdminRoute("/api/v1/admin/things", "Things.", self._things),
            AdminRoute("/api/v1/admin/broken", "Broken.", self._broken),
            AdminRoute("/api/v1/admin/odd", "Odd numbers.", lambda query: {"a": [float("nan"), 1]}),
        )

    def _things(self, query):
        return {"things": {"a": 1}[query["name"]]}

    def _broken(self, query):
        raise BadDataError("limit is too large")


def served(act, *, source=True, **config):
    """Run ``act(client, agents, admin, host)`` against a started extension."""
    host = ManualHost()
    settings = parse_model(
        IngeroThresholdConfig,
        {"agent_endpoint": "127.0.0.1:0", "admin_endpoint": "127.0.0.1:0", **config},
    )
    extension = FACTORY.create(ComponentId("ingero_threshold"), settings)

    async def run():
        await extension.start(host)
        if source:
            host.offer(ThresholdSource, Source())  # components that offer start later
        host.offer(AdminRoutes, Pages())
        try:
            async with local_http.open_async_client() as client:
                return await act(
                    client,
                    f"http://{host.announced['agents']}",
                    f"http://{host.announced['admin']}",
                    host,
                )
        finally:
            await extension.stop()

    return asyncio.run(run())


def ask(query, **options):
    async def act(client, agents, admin, host):
        return await client.get(f"{agents}/api/v1/threshold{query}")

    return served(act, **options)


def admin(path, **options):
    headers = options.pop("headers", {})

    async def act(client, agents, admin, host):
        return await client.get(f"{admin}{path}", headers=headers)

    return served(act, **options)


def test_agent_is_told_its_clusters_threshold():
    answer = ask("?cluster_id=prod+a")
    assert answer.status_code == 200
    assert answer.text == '{"threshold":0.870348,"quorum_met":true}'
    assert answer.headers["content-type"] == "application/json"


def test_cohort_and_node_may_be_named():
    assert ask("?cluster_id=prod%20a&cgroup_path_hash=aa").json() == {
        "threshold": 0.7,
        "quorum_met": False,
    }
    assert ask("?cluster_id=prod%20a&node_id=special").json()["threshold"] == 0.5


@pytest.mark.parametrize("options", [{}, {"source": False}])
def test_unknown_cluster_and_cold_start_are_the_same_short_answer(options):
    answer = ask("?cluster_id=nobody", **options)
    assert (answer.status_code, answer.text) == (200, '{"threshold":0,"quorum_met":false}')


@pytest.mark.parametrize(
    ("query", "description"),
    [
        ("", "cluster_id is missing"),
        ("?cluster_id=", "cluster_id is missing"),
        (f"?cluster_id={'x' * 257}", "cluster_id is longer"),
        (f"?cluster_id=a&node_id={'x' * 257}", "node_id is longer"),
        (f"?cluster_id={'x' * 5000}", "query is longer"),
        ("?cluster_id=a&cluster_id=b", "2 times"),
        ("?" + "&".join(f"a{i}=1" for i in range(20)), "more than 16 fields"),
    ],
)
def test_query_that_cannot_be_answered_is_a_400_that_says_why(query, description):
    answer = ask(query)
    assert answer.status_code == 400
    assert description in answer.json()["error"]
    assert len(answer.content) < 8192


def test_other_methods_and_paths_are_refused_never_redirected_and_counted():
    async def act(client, agents, admin, host):
        url = f"{agents}/api/v1/threshold?cluster_id=prod+a"
        found = [
            await client.post(url),
            await client.delete(url),
            await client.get(f"{agents}/api/v1/threshold/"),
            await client.get(f"{agents}/"),
            await client.head(url),
        ]
        counted = host.read("ingero_fleet_threshold_requests_total", status="405")
        return [answer.status_code for answer in found], found[0].headers["allow"], counted

    statuses, allow, counted = served(act)
    assert statuses == [405, 405, 404, 404, 200]
    assert allow == "GET, HEAD"
    assert counted == 2


def test_push_is_answered_from_the_body_and_from_the_hint_only_without_one():
    async def act(client, agents, admin, host):
        (answerer,) = host.find(PushAnswerer)
        return [
            answerer.answer(push)
            for push in (
                PushContext(cluster_hint="nobody", cluster_id="prod a"),
                PushContext(cluster_hint="prod a"),
                PushContext(cluster_hint="prod a", cluster_id=""),
                PushContext(cluster_hint="prod a", cluster_id="nobody"),
                PushContext(cluster_id="prod a", node_id="special"),
                PushContext(),
            )
        ]

    known = PushAnswer(0.870348, quorum_met=True)
    assert served(act) == [known, known, None, None, PushAnswer(0.5, quorum_met=True), None]


def test_agents_must_show_a_certificate_when_an_authority_is_set(tmp_path):
    authority = trustme.CA()
    server, client_pair = authority.issue_cert("127.0.0.1"), authority.issue_cert("agent@x")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = {
        "cert_file": str(tmp_path / "cert.pem"),
        "key_file": str(tmp_path / "key.pem"),
        "client_ca_file": str(tmp_path / "ca.pem"),
    }

    async def act(client, agents, admin, host):
        url = agents.replace("http:", "https:") + "/api/v1/threshold?cluster_id=prod+a"
        anonymous, known = ssl.create_default_context(), ssl.create_default_context()
        authority.configure_trust(anonymous)
        authority.configure_trust(known)
        client_pair.configure_cert(known)
        async with local_http.open_async_client(verify=known) as good:
            status = (await good.get(url)).status_code
        async with local_http.open_async_client(verify=anonymous) as bad:
            with pytest.raises(httpx.TransportError):
                await bad.get(url)
        return status

    assert served(act, tls=tls) == 200


def test_admin_index_lists_every_page():
    answer = admin("/")
    assert answer.json()["pages"]["/api/v1/admin/things"] == "Things."
    assert "/api/v1/admin/config" in answer.json()["pages"]


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/api/v1/admin/things?name=a", 200, {"things": 1}),
        ("/api/v1/admin/things?name=b", 404, {"error": "'b' is not known"}),
        ("/api/v1/admin/broken", 400, {"error": "limit is too large"}),
        ("/api/v1/admin/odd", 200, {"a": [None, 1]}),
        ("/nowhere", 404, {"error": "no such page; the index is at /api/v1/admin"}),
    ],
)
def test_admin_page_answers_or_says_why_not(path, status, body):
    answer = admin(path)
    assert (answer.status_code, answer.json()) == (status, body)


def test_admin_refuses_names_that_are_not_this_machine_and_other_methods():
    assert admin("/", headers={"host": "evil.example"}).status_code == 403
    assert admin("/", headers={"host": "localhost:8081"}).status_code == 200

    async def act(client, agents, admin, host):
        return (await client.post(f"{admin}/")).status_code

    assert served(act) == 405


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("LOCALHOST:8081", True),
        ("127.0.0.1:8081", True),
        ("127.8.8.8", True),
        ("[::1]:8081", True),
        ("[::1]", True),
        ("10.0.0.1:8081", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_only_loopback_names_are_this_machines_own(host, is_own):
    assert is_own_name(host) is is_own


def test_admin_on_another_address_needs_to_be_allowed():
    with pytest.raises(ConfigError, match="admin_allow_remote"):
        parse_model(IngeroThresholdConfig, {"admin_endpoint": "0.0.0.0:8081"})
    config = parse_model(
        IngeroThresholdConfig, {"admin_endpoint": "0.0.0.0:8081", "admin_allow_remote": True}
    )
    assert config.admin_allow_remote
