"""The default chat template, for a tokenizer that has none, and its special tokens."""

from __future__ import annotations

import copy

from glasshouse.errors import InputError
from glasshouse.text.chat.template import DEFAULT_TEMPLATE
from glasshouse.text.tokenizer import Tokenizer

CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # of DEFAULT_TEMPLATE


def with_chat_template(tok: Tokenizer) -> Tokenizer:
    """Return a tokenizer with a chat template: this one, or a copy with ours if it has the tokens for that.

    A model chats once it was trained on conversations, so a new tokenizer has no template; preparing conversations
    gives it one.

    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> tok.chat_template is None, with_chat_template(tok).chat_template is None
    (True, False)
    """
    ids = {tok.token_to_id(token) for token in CHAT_TOKENS}
    if tok.chat_template is not None or not ids <= tok.special_ids:
        return tok
    copied = copy.copy(tok)
    copied.chat_template = DEFAULT_TEMPLATE
    return copied


def chat_token_ids(tok: Tokenizer) -> set[int]:
    """Return the special tokens that the chat template writes around the messages of a conversation.

    >>> tok = with_chat_template(Tokenizer.train(texts=["to be"], vocab_size=263))
    >>> sorted(tok.id_to_token(number) for number in chat_token_ids(tok))
    ['<|assistant|>', '<|end|>', '<|system|>', '<|user|>']
    """
    system, *turns = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))
    found: set[int] = set()
    for messages in (turns, [system, *turns]):
        try:
            found |= {*tok.encode_chat(messages).ids} & tok.special_ids
        except InputError:  # many templates take no system message
            continue
    return found
