"""Requests drawn from our own OpenAPI document, good and bad: none is answered by a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from examples import up_to
from hypothesis import HealthCheck, Phase, given, settings
from serve.conftest import KEYS
from serve.plain_http import eventually, is_idle

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.serve.schema import openapi

schemathesis = pytest.importorskip("schemathesis")

MODES = list(schemathesis.GenerationMode)
FEW = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


@pytest.fixture(scope="module")
def server(
    tok: gh.Tokenizer, decoder: gh.models.Decoder, pair: gh.models.Seq2Seq, encoder: gh.models.Encoder
) -> Iterator[Server]:
    """Short answers, so that the time goes to drawing requests."""
    models = [ServedModel("decoder", decoder, tok, slots=8, max_len=48), ServedModel("encoder", encoder, tok)]
    models.append(ServedModel("pair", pair, tok, slots=4, max_len=16))
    made = Server(models, keys=KEYS, limits=Limits(max_waiting=8))
    made.start()
    yield made
    made.close()


def check(server: Server, mode: Any, examples: int) -> None:  # noqa: ANN401 - an enum of schemathesis
    schema = schemathesis.openapi.from_dict(openapi.document(server.api.models))
    statuses = []

    @settings(max_examples=examples, **FEW)
    @given(case=schema.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:  # noqa: ANN401 - its type is schemathesis' own
        answer = case.call(base_url=server.address, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)
        statuses.append(answer.status_code)
        assert answer.status_code < 500, (answer.status_code, answer.text, case.as_curl_command())
        if answer.status_code >= 400 and answer.headers.get("content-type") == "application/json":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    one()
    assert len(statuses) >= examples // 2
    assert eventually(lambda: is_idle(server))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_no_request_is_our_fault(server: Server, mode: Any) -> None:  # noqa: ANN401
    check(server, mode, up_to(160))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_no_request_is_our_fault_thousands_of_times(server: Server, mode: Any) -> None:  # noqa: ANN401
    check(server, mode, 1000)
