"""Reads a tokenizer from a folder that has vocabulary files and no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.conversion.added_tokens import added_tokens
from glasshouse.text.conversion.tokenizer_class import CLASSES, OF_FILE, OF_MODEL_TYPE, TokenizerClass
from glasshouse.text.tokenizer_folder import CONFIG, TOKENIZER, TokenizerFiles, read_json_object, refuse_code
from glasshouse.text.tokenizer_json import find_special_tokens

MODEL_CONFIG, ADDED_TOKENS = "config.json", "added_tokens.json"
ANY_CLASS = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")  # which name no files


class UnsupportedTokenizerError(StoreError):
    """The vocabulary files are of a class of tokenizers that is not supported."""


def read_folder(path: Path) -> TokenizerFiles:
    """Read the tokenizer.json of a folder (or that file) and what is beside it, or convert its vocabulary files."""
    file = path if path.is_file() else path / TOKENIZER
    files = TokenizerFiles.read(file)
    if file.is_file():
        return files
    refuse_code(files.config, str(path / CONFIG))
    name = class_name(path, files.config)
    kind = CLASSES.get(name)
    if kind is None:
        raise UnsupportedTokenizerError(
            f"{str(path)!r} has no {TOKENIZER}, and without one its {name[:80]} is not supported; give a folder that "
            f"has it, or one of {', '.join(CLASSES)}."
        )
    if not (vocabulary := path / kind.file).is_file():
        raise StoreError(f"there is no {str(vocabulary)!r}, which {name} needs; download the folder again.")
    return _converted(vocabulary, kind, files)


def class_name(folder: Path, config: JsonDict) -> str:
    """Return the class of a folder's tokenizer: as its files name it, or as its model or vocabulary file has it."""
    found = next((name for name in OF_FILE if (folder / name).is_file()), None)
    if found is None:
        names = ", ".join(OF_FILE)
        raise StoreError(f"there is no {str(folder / TOKENIZER)!r}; give a folder with a {TOKENIZER}, or {names}.")
    model = read_json_object(folder / MODEL_CONFIG)
    for table in (config, model):
        if isinstance(name := table.get("tokenizer_class"), str) and name not in ANY_CLASS:
            return name.removesuffix("Fast")
    return OF_MODEL_TYPE.get(str(model.get("model_type")), OF_FILE[found])


def _converted(path: Path, kind: TokenizerClass, beside: TokenizerFiles) -> TokenizerFiles:
    source = str(path)
    config = beside.special_tokens_map | beside.config
    given = find_special_tokens(config, source)
    usual = {role: text for role, text in kind.special_tokens.items() if config.get(f"{role}_token", "") is not None}
    special_tokens = usual | given
    steps = kind.build(path, config | {"unk_token": special_tokens.get("unk")})
    ids = steps.ids()
    declared = read_json_object(path.with_name(ADDED_TOKENS))
    # A role that no file gives exists where the vocabulary has its usual token.
    special_tokens = {role: text for role, text in special_tokens.items() if role in given or text in ids}
    tokens = added_tokens(steps, config, declared, special_tokens.values(), source)
    ids |= {token["content"]: token["id"] for token in tokens}
    for role in steps.before + steps.after:
        if role not in special_tokens:
            raise StoreError(f"{source!r} has no {kind.special_tokens.get(role)!r}, the {role} token; name another.")
    if (unknown := steps.model.get("unk_token")) is not None and unknown not in ids:
        raise StoreError(f"{source!r} has no {unknown!r}, which stands for unknown tokens; download it again.")
    text = json.dumps(steps.to_json(tokens, special_tokens, ids), ensure_ascii=False)
    roles: dict[str, Any] = {f"{role}_token": token for role, token in special_tokens.items()}
    inputs = ["input_ids", *(["token_type_ids"] if steps.type_ids else []), "attention_mask"]
    new = roles | {"model_input_names": inputs} | beside.config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return TokenizerFiles(text, new, beside.special_tokens_map, beside.chat_template, source)
