"""The classes of tokenizers that transformers has for vocabulary files, and which one a folder needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.text.conversion import byte_level, sentencepiece, wordpiece
from glasshouse.text.conversion.pipeline import Pipeline


@dataclass(frozen=True)
class TokenizerClass:
    """How the vocabulary files of a class of tokenizers are read, and its special tokens where no file says more."""

    file: str
    build: Callable[[Path, JsonDict], Pipeline]
    special_tokens: Mapping[str, str]


BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
END = "<|endoftext|>"
ROBERTA = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
GEMMA = {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"}

BERT_TOKENIZER = TokenizerClass("vocab.txt", wordpiece.bert, BERT)
GPT2 = {"bos": END, "eos": END, "unk": END}
ROBERTA_TOKENIZER = TokenizerClass("vocab.json", byte_level.roberta, ROBERTA)
CLASSES = {
    "BertTokenizer": BERT_TOKENIZER,
    "DistilBertTokenizer": BERT_TOKENIZER,
    "ElectraTokenizer": BERT_TOKENIZER,
    "GPT2Tokenizer": TokenizerClass("vocab.json", byte_level.gpt2, GPT2),
    "GPTNeoXTokenizer": TokenizerClass("vocab.json", byte_level.gpt_neox, GPT2 | {"pad": "<|padding|>"}),
    "Qwen2Tokenizer": TokenizerClass("vocab.json", byte_level.qwen2, {"unk": END, "eos": END, "pad": END}),
    "RobertaTokenizer": ROBERTA_TOKENIZER,
    "BartTokenizer": ROBERTA_TOKENIZER,
    "LlamaTokenizer": TokenizerClass(
        "tokenizer.model", sentencepiece.llama, {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    ),
    "GemmaTokenizer": TokenizerClass("tokenizer.model", sentencepiece.llama, GEMMA),
    "T5Tokenizer": TokenizerClass("spiece.model", sentencepiece.t5, {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}),
    "XLMRobertaTokenizer": TokenizerClass("sentencepiece.bpe.model", sentencepiece.xlm_roberta, ROBERTA),
}
OF_MODEL_TYPE = {  # of config.json, where no file names a class
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "bart": "BartTokenizer",
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "phi3": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "marian": "MarianTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
OF_FILE = {  # where no file names a class or a model; the first that exists counts
    "source.spm": "MarianTokenizer",
    "tokenizer.model": "LlamaTokenizer",
    "spiece.model": "T5Tokenizer",
    "sentencepiece.bpe.model": "XLMRobertaTokenizer",
    "vocab.txt": "BertTokenizer",
    "vocab.json": "GPT2Tokenizer",
}
