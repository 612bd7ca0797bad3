"""Health, debugging pages and bearers, asked as their users ask them."""

import asyncio

import pytest
from tests.support import local_http

from ingero.config import parse_model
from ingero.errors import ConfigError, IngeroError
from ingero.fleet.component import (
    ComponentId,
    ComponentKind,
)
from ingero.fleet.extensions import bearertokenauth, health_check, zpages
from ingero.fleet.views import (
    PipelineView,
    ServiceStatus,
    ServiceView,
)
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S


class View:
    """A `ServiceView` that says what a test wants."""

    def __init__(self):
        self.status = ServiceStatus.RUNNING
        self.started_wall_ns = 1_767_225_500_000_000_000
        self.config_source = "<fleet>.yaml"

    def components(self):
        return [(ComponentKind.RECEIVER, ComponentId("otlp"))]

    def pipelines(self):
        errors = ((1_767_225_600_000_000_000, "<b>bad</b>"),)
        return [
            PipelineView("metrics", ("otlp",), ("batch",), ("debug",), 3, (0.001,), (2, 1), errors)
        ]


def _ask(factory, settings, paths, view=None):
    """Start the extension, get each path; the answers."""
    host = ManualHost()
    host.offer(ServiceView, view or View())

    async def scenario():
        config = parse_model(factory.config, {"endpoint": "127.0.0.1:0", **settings})
        extension = factory.create(ComponentId(factory.type), config)
        await extension.start(host)
        async with local_http.open_async_client(base_url=f"http://{host.announced['']}") as client:
            answers = [await client.get(path) for path in paths]
        await extension.stop()
        return answers

    return asyncio.run(scenario())


def test_health_is_200_while_running_and_503_otherwise():
    view = View()
    (answer,) = _ask(health_check.FACTORY, {}, ["/"], view)
    assert (answer.status_code, answer.json()["status"]) == (200, "Server available")
    assert answer.json()["uptime"] == "1.67 m"
    for status in (ServiceStatus.STARTING, ServiceStatus.DRAINING):
        view.status = status
        (answer,) = _ask(health_check.FACTORY, {}, ["/"], view)
        assert (answer.status_code, answer.json()["state"]) == (503, status.value)


def test_health_path_and_bodies_are_what_the_settings_say():
    settings = {"path": "/healthz", "response_body": {"healthy": "ok"}}
    good, wrong = _ask(health_check.FACTORY, settings, ["/healthz", "/"])
    assert (good.status_code, good.text) == (200, "ok")
    assert wrong.status_code == 404


def test_zpages_show_components_pipelines_and_refusals_and_escape_what_others_wrote():
    service, pipelines, traces, wrong = _ask(
        zpages.FACTORY, {}, ["/debug/servicez", "/debug/pipelinez", "/debug/tracez", "/"]
    )
    assert "<td>otlp</td>" in service.text
    assert "&lt;fleet&gt;.yaml" in service.text
    assert "<td>batch</td><td>debug</td><td>3</td>" in pipelines.text
    assert "<td>2</td><td>1</td>" in traces.text
    assert "&lt;b&gt;bad&lt;/b&gt;" in traces.text
    assert wrong.status_code == 404
    assert "/debug/tracez" in wrong.text


def _auth(settings, host=None):
    host = host or ManualHost()
    auth = bearertokenauth.FACTORY.create(
        ComponentId("bearertokenauth"), parse_model(bearertokenauth.BearerTokenAuthConfig, settings)
    )
    asyncio.run(auth.start(host))
    return auth, host


def test_right_token_has_a_subject_that_does_not_contain_it_and_wrong_ones_are_counted():
    auth, host = _auth({"token": "s3cret"})
    subject = auth.authenticate("Bearer s3cret")
    assert subject is not None
    assert "s3cret" not in subject
    assert auth.authenticate("bearer s3cret") == subject
    for wrong in (
        "Bearer other",
        "Bearer ",
        "s3cret",
        "Basic s3cret",
        "Bearer s3cret2",
        "",
        "Bearer \udcff",
    ):
        assert auth.authenticate(wrong) is None
    assert auth.authenticate(None) is None
    name = "ingero_fleet_auth_refused_total"
    assert host.read(name, extension="bearertokenauth", reason="wrong") == 7
    assert host.read(name, extension="bearertokenauth", reason="missing") == 1


def test_client_sends_the_first_token_with_its_scheme_in_its_header():
    auth, _ = _auth({"tokens": ["a", "b"], "scheme": "Token", "header": "X-Auth"})
    assert auth.client_headers() == {"X-Auth": "Token a"}
    assert auth.authenticate("Token b") is not None
    assert auth.authenticate("Bearer b") is None


def test_without_a_scheme_the_header_is_the_token_alone():
    auth, _ = _auth({"token": "s3 cret", "scheme": ""})
    assert auth.client_headers() == {"Authorization": "s3 cret"}
    assert auth.authenticate("s3 cret") is not None
    for wrong in ("Bearer s3 cret", "cret", "", "S3 cret"):
        assert auth.authenticate(wrong) is None


def test_changed_token_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("old\n")
    auth, host = _auth({"filename": str(file), "refresh_interval": "2s"})
    assert auth.authenticate("Bearer old") is not None
    file.write_text("new\nnewer\n")
    assert auth.authenticate("Bearer new") is None
    host.advance(2 * NS_PER_S)
    assert auth.authenticate("Bearer old") is None
    assert auth.authenticate("Bearer newer") is not None
    file.write_text("\n  \n\n")
    host.advance(2 * NS_PER_S)
    assert auth.authenticate("Bearer new") is not None
    file.unlink()
    host.advance(2 * NS_PER_S)
    assert auth.client_headers() == {"Authorization": "Bearer new"}


@pytest.mark.parametrize(
    "settings",
    [
        {"token": " s3cret\r\n"},
        {"tokens": ["s3cret\n"]},
        {"cluster_tokens": [{"token": "\ts3cret ", "clusters": ["x"]}]},
    ],
)
def test_white_space_around_a_token_does_not_belong_to_it(settings):
    auth, _ = _auth(settings)
    assert auth.client_headers() == {"Authorization": "Bearer s3cret"}
    assert auth.authenticate("Bearer s3cret") is not None


@pytest.mark.parametrize("token", ["s3cret\nX: y", "s3cret\x00", "s3cret\x7f", "s3crét"])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (lambda token: {"token": token}, "token"),
        (lambda token: {"tokens": ["a", token]}, "tokens.1"),
        (
            lambda token: {"cluster_tokens": [{"token": token, "clusters": ["x"]}]},
            "cluster_tokens.0.token",
        ),
    ],
)
def test_a_token_that_no_header_carries_is_refused_by_its_key_alone(settings, key, token):
    with pytest.raises(ConfigError, match="not printable ASCII") as raised:
        parse_model(bearertokenauth.BearerTokenAuthConfig, settings(token))
    (problem,) = raised.value.problems
    assert problem.path.replace("[", ".").replace("]", "") == key
    assert "s3cr" not in str(problem)


@pytest.mark.parametrize("line", ["s3crét", "s3c\x1cret", "s3cret\x00 clusters=x"])
def test_a_line_whose_token_no_header_carries_is_refused_by_its_place_alone(tmp_path, line, caplog):
    file = tmp_path / "tokens"
    file.write_text(f"old\n{line}\n")
    with pytest.raises(ConfigError, match=rf"{file} line 2: .* not printable ASCII") as raised:
        _auth({"filename": str(file)})
    file.write_text("old\r\n")
    auth, host = _auth({"filename": str(file), "refresh_interval": "2s"})
    file.write_text(f"{line}\n")
    host.advance(2 * NS_PER_S)
    assert auth.client_headers() == {"Authorization": "Bearer old"}
    assert f"{file} line 1" in caplog.text
    assert "s3c" not in str(raised.value) + caplog.text


@pytest.mark.parametrize("settings", [{"scheme": "Bear\ner"}, {"header": "X Auth"}])
def test_a_scheme_or_a_name_that_no_header_carries_is_refused(settings):
    with pytest.raises(ConfigError):
        parse_model(bearertokenauth.BearerTokenAuthConfig, {"token": "a", **settings})


def test_missing_token_file_stops_the_start(tmp_path):
    with pytest.raises(IngeroError, match=r"nowhere: No such file"):
        _auth({"filename": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("\n", "no token"),
        ("a\x00b", "line 1"),
        ("a\na clusters=x", "there twice"),
    ],
)
def test_a_bad_token_file_is_found_without_a_start(tmp_path, content, problem):
    file = tmp_path / "tokens"
    settings = parse_model(bearertokenauth.BearerTokenAuthConfig, {"filename": str(file)})
    if content is not None:
        file.write_text(content)
    with pytest.raises(IngeroError, match=problem):
        bearertokenauth.FACTORY.check_files(settings)
    file.write_text("a\nb clusters=x")
    bearertokenauth.FACTORY.check_files(settings)


@pytest.mark.parametrize("settings", [{}, {"token": "a", "filename": "b"}, {"tokens": []}])
def test_exactly_one_source_of_tokens_is_wanted(settings):
    with pytest.raises(ConfigError, match="exactly one"):
        parse_model(bearertokenauth.BearerTokenAuthConfig, settings)


def test_a_token_that_is_bound_to_clusters_says_so_and_others_may_speak_for_any():
    auth, _ = _auth({
        "tokens": ["free"],
        "cluster_tokens": [{"token": "a", "clusters": ["x", "y"]}],
    })
    assert auth.find_clusters(auth.authenticate("Bearer a")) == {"x", "y"}
    assert auth.find_clusters(auth.authenticate("Bearer free")) is None
    assert auth.find_clusters("token:000000000000") == frozenset()
    assert auth.client_headers() == {"Authorization": "Bearer free"}


def test_a_line_of_the_file_binds_its_token(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("one\ntwo clusters=x, y\n")
    auth, host = _auth({"filename": str(file), "refresh_interval": "2s"})
    assert auth.find_clusters(auth.authenticate("Bearer one")) is None
    assert auth.find_clusters(auth.authenticate("Bearer two")) == {"x", "y"}
    file.write_text("two clusters=\n")
    host.advance(2 * NS_PER_S)
    assert auth.find_clusters(auth.authenticate("Bearer two")) == {"x", "y"}, (
        "a bad file is not used"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster_tokens": [{"token": "a", "clusters": []}]},
        {"token": "a", "cluster_tokens": [{"token": "b", "clusters": ["x"]}]},
    ],
)
def test_a_binding_to_nothing_is_refused(settings):
    with pytest.raises(ConfigError):
        parse_model(bearertokenauth.BearerTokenAuthConfig, settings)


def test_one_token_for_different_clusters_in_two_places_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        _auth({"tokens": ["a"], "cluster_tokens": [{"token": "a", "clusters": ["x"]}]})
