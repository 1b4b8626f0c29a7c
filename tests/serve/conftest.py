"""A server with small random models, one of each kind, in a thread of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.text.chat.tokens import with_chat_template

openai = pytest.importorskip("openai")

TEXT = "to be, or not to be, that is the question:\nwhether 'tis nobler in the mind to suffer é ü 漢字 " * 4
KEYS = ("a-key-of-enough-characters", "another-key-of-enough-characters")
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def tok() -> gh.Tokenizer:
    return with_chat_template(gh.Tokenizer.train(texts=[TEXT], vocab_size=300))


@pytest.fixture(scope="session")
def decoder(tok: gh.Tokenizer) -> gh.models.Decoder:
    torch.manual_seed(0)
    end = tok.token_to_id("<|end|>")
    return gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=256, end_ids=(end,))).eval()


@pytest.fixture(scope="session")
def pair(tok: gh.Tokenizer) -> gh.models.Seq2Seq:
    torch.manual_seed(1)
    return gh.build(gh.preset("tiny-seq2seq", vocab_size=len(tok), max_len=64, start_id=0, end_ids=(1,))).eval()


@pytest.fixture(scope="session")
def encoder(tok: gh.Tokenizer) -> gh.models.Encoder:
    torch.manual_seed(2)
    return gh.build(gh.preset("tiny-encoder", vocab_size=len(tok), max_len=128)).eval()


@pytest.fixture(scope="module")
def server(
    tok: gh.Tokenizer, decoder: gh.models.Decoder, pair: gh.models.Seq2Seq, encoder: gh.models.Encoder
) -> Iterator[Server]:
    models = [
        ServedModel("decoder", decoder, tok, slots=8),
        ServedModel("pair", pair, tok, slots=4),
        ServedModel("encoder", encoder, tok),
    ]
    made = Server(models, keys=KEYS, limits=Limits(max_waiting=64))
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEYS[0], max_retries=0, timeout=60) as made:
        yield made
