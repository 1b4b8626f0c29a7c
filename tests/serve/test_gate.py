"""Who gets in: the holder of a key, by the server's own name, and no page of another site."""

from __future__ import annotations

import pytest
import torch
from serve.conftest import KEYS
from serve.plain_http import ask

import glasshouse as gh
from glasshouse.serve import ServedModel, Server
from glasshouse.serve.app import POSTS
from glasshouse.serve.gate import Keys
from glasshouse.serve.schema import openapi

PATHS = [*openapi.GETS, *openapi.POSTS, "/", "/nowhere", "/v1", "/health/", "//health", "/health/../metrics"]


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/health"])
def test_every_route_but_health_needs_a_key(server: Server, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
        for wrong in (None, "", "wrong", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper()):
            assert ask(server, path, method=method, key=wrong).status == 401
    assert ask(server, path, key=None, Authorization=f"Basic {KEYS[0]}").status == 401
    answer = ask(server, path, key=None)
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(server: Server) -> None:
    assert ask(server, "/health", key=None).json() == {"status": "ok"}
    assert ask(server, "/ready").json() == {"status": "ready"}


def test_the_document_lists_every_route(server: Server) -> None:
    assert set(POSTS) == set(openapi.POSTS)
    assert ask(server, "/openapi.json").json() == openapi.document(["decoder", "pair", "encoder"])
    for path in openapi.GETS:
        assert ask(server, path.replace("{name}", "decoder")).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost."])
def test_a_name_that_was_rebound_is_refused(server: Server, host: str) -> None:
    assert ask(server, "/v1/models", Host=host.format(port=server.port)).status == 403
    assert ask(server, "/health", Host=host.format(port=server.port)).status == 403


def test_own_names_are_accepted(server: Server) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        assert ask(server, "/v1/models", Host=f"{host}:{server.port}").status == 200


def test_pages_are_refused(server: Server) -> None:
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port}"):
        answer = ask(server, "/v1/models", Origin=origin)
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_body_must_say_that_it_is_json(server: Server) -> None:
    """A page can send a form or a text to another site without being asked for leave."""
    assert ask(server, "/v1/completions", b"{}", Content_Type="text/plain").status == 415


def test_paths_and_methods(server: Server) -> None:
    assert ask(server, "/nowhere").status == 404
    assert ask(server, "/v1/completions").status == 405
    assert ask(server, "/v1/models/").status == 404
    assert set(ask(server, "/nowhere").json()["error"]) == {"message", "type", "param", "code", "request_id"}


@pytest.fixture(scope="module")
def tiny() -> ServedModel:
    torch.manual_seed(0)
    return ServedModel("tiny", gh.build(gh.preset("tiny-decoder")).eval(), None, slots=1, max_len=16)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_other_machines_only_with_a_key(tiny: ServedModel, host: str) -> None:
    with pytest.raises(gh.InputError, match="no key"):
        Server([tiny], host=host)


def test_a_key_that_can_be_guessed_is_refused(tiny: ServedModel) -> None:
    for key in ("", "short", "with a space in the middle", "naïve-but-long-enough"):
        with pytest.raises(gh.InputError, match="16 or more"):
            Server([tiny], keys=[key])


def test_origins_and_hosts_that_were_asked_for(tiny: ServedModel) -> None:
    made = Server([tiny], allowed_origins=["https://chat.example"], allowed_hosts=["gpu.example"])
    made.start()
    try:
        answer = ask(made, "/v1/models", key=None, Origin="https://chat.example", Host=f"gpu.example:{made.port}")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        preflight = ask(made, "/v1/completions", method="OPTIONS", key=None, Origin="https://chat.example")
        assert preflight.status == 204
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert ask(made, "/v1/models", key=None, Origin="https://other.example").status == 403
        assert ask(made, "/v1/models", key=None).status == 200  # on loopback, without keys
    finally:
        made.close()


def test_names_of_models_are_different(tiny: ServedModel) -> None:
    with pytest.raises(gh.InputError, match="two models are named 'tiny'"):
        Server([tiny, tiny])


def test_only_hashes_of_keys_are_kept() -> None:
    keys = Keys(KEYS)
    assert keys.find(f"bearer {KEYS[1]}") == "key-2"
    assert not any(key.encode() in repr(vars(keys)).encode() for key in KEYS)
