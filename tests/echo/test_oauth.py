"""The real ``ingero-echo serve`` as an OAuth protected resource, next to its bearers."""

import asyncio
import json
import signal
from hashlib import sha256

import httpx2
from mcp import Client
from mcp.client.auth.utils import extract_resource_metadata_from_www_auth
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import ProtectedResourceMetadata
from tests.echo.service.conftest import ALL, ONE
from tests.echo.serving import Served
from tests.serving.oauth_issuer import ISSUER, Issuer

RESOURCE = "http://127.0.0.1:8081/mcp"


def served(folder, issuer):
    given = {"issuer": ISSUER, "resource": RESOURCE, "jwks_file": issuer.file}
    return Served(folder, **{f"oauth_{name}": value for name, value in given.items()})


def list_tools(url, token):
    async def ask():
        headers = {"authorization": f"Bearer {token}"}
        http = httpx2.AsyncClient(headers=headers, timeout=120)
        async with http, Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client:
            return [tool.name for tool in (await client.list_tools()).tools]

    return asyncio.run(ask())


def test_a_client_finds_the_authorization_server_and_its_token_reads_its_clusters(tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    with served(tmp_path, issuer) as echo:
        refused = httpx2.post(f"{echo.url}/mcp", json={})
        assert refused.status_code == 401
        found = extract_resource_metadata_from_www_auth(refused)
        assert found == "http://127.0.0.1:8081/.well-known/oauth-protected-resource/mcp"
        document = echo.get(httpx2.URL(found).path, token="")
        assert document.headers["content-type"] == "application/json"
        metadata = ProtectedResourceMetadata.model_validate_json(document.content)
        assert [str(one) for one in metadata.authorization_servers] == [ISSUER]
        assert str(metadata.resource) == RESOURCE

        token = issuer.sign(aud=RESOURCE, ingero_clusters=["c1"])
        assert "fleet.cluster.summary" in list_tools(echo.url, token)
        whoami = echo.get("/api/v2/whoami", token).json()
        assert whoami["cluster_ids"] == ["c1"]
        assert whoami["bearer_id"] == sha256(f"{ISSUER}\0ada".encode()).hexdigest()
        foreign = echo.ask("fleet.cluster.summary", {"cluster_id": "c2"}, token)
        assert foreign.status_code == 403
        assert echo.get("/api/v2/whoami", ONE).json()["cluster_ids"] == ["c1"]  # bearers stay
        other = echo.get("/api/v2/whoami", issuer.sign(ingero_clusters="*"))  # of another audience
        assert other.status_code == 401
        assert 'error="invalid_token"' in other.headers["www-authenticate"]


def test_the_authorization_servers_new_keys_are_read_at_sighup(tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    with served(tmp_path, issuer) as echo:
        old = issuer.sign(aud=RESOURCE, ingero_clusters="*")
        assert echo.get("/api/v2/whoami", old).status_code == 200
        issuer = Issuer(issuer.file)
        echo.process.send_signal(signal.SIGHUP)
        new = issuer.sign(aud=RESOURCE, ingero_clusters="*")
        while echo.get("/api/v2/whoami", new).status_code != 200:
            pass  # until the signal was seen
        assert echo.get("/api/v2/whoami", old).status_code == 401


def test_without_an_authorization_server_there_is_no_metadata(tmp_path):
    with Served(tmp_path) as echo:
        none = echo.get("/.well-known/oauth-protected-resource/mcp", token="")
        assert (none.status_code, none.headers["www-authenticate"]) == (401, "Bearer")
        known = echo.get("/.well-known/oauth-protected-resource/mcp", ALL)
        assert known.status_code == 404
        assert json.loads(known.content)["code"] == "not_found"
