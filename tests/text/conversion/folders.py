"""Small folders as they were published before tokenizer.json, and odd texts to encode."""

from __future__ import annotations

import functools
import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import pre_tokenizers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it jumps back again.",
    "Hello there! It's 2024, and 12345 tokens aren't many: naïve café, größer als 10 €.",
    "<p>if a < b / 2 then s = [x] else s = (y)</p>    return  s\t# 你好 世界 🙂 привет мир",
]
SCRIPTS = [
    *(
        "Hello world",
        "привет мир",
        "你好世界",
        "مرحبا",
        "שלום",
        "नमस्ते",
        "こんにちは",
        "안녕",
        "ελλάδα",
        "ไทย",
        "İıŞß",
    ),
    *(
        "🙂👩\u200d👩\u200d👧",
        "é e\u0301 ﬁ Å ½ ² Ⅷ ㎏",
        "\u200b\u200d\ufeff",
        "\x00\x01\x07\x1b\x7f\x85\x9f",
        "\t\n\r\x0b\x0c",
    ),
    *(
        "   ",
        " " * 40,
        "\u00a0\u3000\u2003\u2028",
        "▁ ▁▁",
        "a" * 150,
        "1234567890",
        "don't I'M we'll",
        "``x''",
        "\n\n",
    ),
    *("\U0010ffff\ue000", "##ing", "the quick", " The"),
]
SPECIAL = [
    *(
        "<s></s><unk><pad><mask>",
        "[CLS] [SEP] [MASK] [UNK]",
        "<|endoftext|>",
        "<extra_id_0>",
        "<0x0A>",
        "<bos>x<eos>",
    ),
    *("<start_of_turn>", "</s", "<s >", "a  <mask>  b"),
]


@functools.cache
def odd_texts(count: int = 1000) -> list[str]:
    """Every script, emoji, control characters, runs of spaces and special tokens, put together at random."""
    rng = random.Random(1)
    texts = ["", " ", "\n", "a", " a", "a ", "  a  b  ", *SCRIPTS, *SPECIAL]
    while len(texts) < count:
        parts = [_part(rng) for _ in range(rng.randint(1, 5))]
        texts.append(rng.choice(["", " ", "  "]).join(parts))
    return texts


def _part(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice([*SCRIPTS, *SPECIAL])
    ranges = [(0x20, 0x7E), (0, 0x24FF), (0, 0xD7FF), (0xE000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 6)))


@functools.cache
def sentencepiece_model(**settings: Any) -> bytes:  # noqa: ANN401 - the trainer's own settings
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5), model_writer=out, minloglevel=2, hard_vocab_limit=False, **settings
    )
    return out.getvalue()


LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 420,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
GEMMA = LLAMA | {
    "add_dummy_prefix": False,
    **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"},
    "user_defined_symbols": "<mask>,\n\n,▁▁,<start_of_turn>",
}
T5 = {"model_type": "unigram", "vocab_size": 150, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
XLM_ROBERTA = {"model_type": "unigram", "vocab_size": 150}

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = [
    "[PAD]",
    "[unused0]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *LETTERS,
    *".,!<>[]#'é你",
    "İ",
    "the",
    "quick",
    "##ick",
]
VOCAB_TXT = "\n".join([*WORDS, *("##" + letter for letter in LETTERS)]) + "\n"
FIRST = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|padding|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_JSON = json.dumps({token: number for number, token in enumerate([*FIRST, *BYTES, "th", "the", "Ġt"])})
MERGES_TXT = "#version: 0.2\nt h\nth e\nĠ t\n"

Files = dict[str, str | bytes | dict[str, Any]]
BYTE_LEVEL: Files = {"vocab.json": VOCAB_JSON, "merges.txt": MERGES_TXT}
WITH_BOS = {"add_bos_token": True, "add_eos_token": False}


def config(tokenizer_class: str, **settings: object) -> Files:
    return {"tokenizer_config.json": {"tokenizer_class": tokenizer_class, **settings}}


def model_type(name: str) -> Files:
    return {"config.json": {"model_type": name}}


@functools.cache
def kinds() -> dict[str, Files]:
    """Return the files of a folder of each kind."""
    llama, gemma = sentencepiece_model(**LLAMA), sentencepiece_model(**GEMMA)
    t5, xlm_roberta = sentencepiece_model(**T5), sentencepiece_model(**XLM_ROBERTA)
    sentinels = [f"<extra_id_{number}>" for number in range(100)]
    pad: dict[str, Any] = {"content": "<pad>", "special": True}
    mask = {"content": "<mask>", "lstrip": True, "special": True, "__type": "AddedToken"}
    return {
        "BERT": {"vocab.txt": VOCAB_TXT, **model_type("bert")},
        "BERT, cased": {"vocab.txt": VOCAB_TXT, **config("BertTokenizer", do_lower_case=False)},
        "BERT, accents": {
            "vocab.txt": VOCAB_TXT,
            **config("BertTokenizerFast", strip_accents=False, tokenize_chinese_chars=False),
        },
        "GPT-2": {**BYTE_LEVEL, **model_type("gpt2")},
        "GPT-2, <s> first": {**BYTE_LEVEL, **config("GPT2Tokenizer", **WITH_BOS, bos_token="<s>", pad_token="<pad>")},
        "RoBERTa": {**BYTE_LEVEL, **model_type("roberta")},
        "RoBERTa, spaces before <mask>": {**BYTE_LEVEL, **config("RobertaTokenizer", mask_token=mask)},
        "BART": {**BYTE_LEVEL, **model_type("bart"), "tokenizer_config.json": {"add_prefix_space": True}},
        "GPT-NeoX": {**BYTE_LEVEL, **model_type("gpt_neox")},
        "Qwen2": {**BYTE_LEVEL, **config("Qwen2Tokenizer", bos_token=None, add_bos_token=False)},
        "Llama": {"tokenizer.model": llama, **config("LlamaTokenizer", **WITH_BOS, legacy=False)},
        "Llama, added tokens": {
            "tokenizer.model": llama,
            **config("LlamaTokenizer", **WITH_BOS, pad_token="<pad>", added_tokens_decoder={"420": pad}),
        },
        "Gemma": {"tokenizer.model": gemma, **config("GemmaTokenizer", **WITH_BOS)},
        "T5": {"spiece.model": t5, **model_type("t5")},
        "T5, sentinels named": {
            "spiece.model": t5,
            **config("T5Tokenizer", extra_ids=100, additional_special_tokens=sentinels),
        },
        "XLM-RoBERTa": {"sentencepiece.bpe.model": xlm_roberta, **model_type("xlm-roberta")},
    }


def write(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
