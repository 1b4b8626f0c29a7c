"""Strict reader of a config.json: keys that are neither used nor known to have no effect are an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from glasshouse.config import did_you_mean
from glasshouse.errors import StoreError

# Keys that transformers writes into any config and that do not change the forward pass: names and versions, output
# options, training settings, ids read elsewhere; and, in older configs, generation settings.
IGNORED_KEYS = frozenset(
    """
    _attn_implementation_autoset _name_or_path _num_labels architectures chunk_size_feed_forward
    cross_attention_hidden_size dtype finetuning_task glasshouse gradient_checkpointing id2label is_encoder_decoder
    label2id model_type name_or_path num_labels output_attentions output_hidden_states output_past prefix problem_type
    return_dict task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version use_bfloat16 use_cache

    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    """.split()  # noqa: SIM905 - sixty names read better in lines than in a column
)
GENERATION_KEYS = frozenset(
    """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p
    """.split()  # noqa: SIM905
)

# Options of the base class that change the architecture; published models of the supported families leave them off.
OFF = ("is_decoder", "add_cross_attention", "tie_encoder_decoder", "pruned_heads")


class ConfigReader:
    """A config that keeps track of the keys that were read.

    >>> keys = ConfigReader({"n_embd": 64, "colour": "green"})
    >>> keys.get_int("n_embd", 768), keys.get_int("n_layer", 12)
    (64, 12)
    >>> keys.reject_unused(ignored=())
    Traceback (most recent call last):
    ...
    glasshouse.errors.StoreError: 'config.json' has colour = 'green', which is unknown and may change the results; \
if it does not, load with ignore=['colour'].
    """

    def __init__(self, table: Mapping[str, Any], source: str = "config.json", ignore: Collection[str] = ()) -> None:
        self.table = table
        self.ignore = ignore
        self.source = source
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON has values of any type
        """Return a value, null included; the default if the key is absent."""
        self.used.add(name)
        return self.table.get(name, default)

    def get_typed(self, name: str, default: Any) -> Any:  # noqa: ANN401 - as typed as its default
        """Return a value of the default's type; the default if the key is null or absent."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not type(default):
            nouns = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
            raise StoreError(f"{self.source!r} has {name} = {_short(value)}, but it must be {nouns[type(default)]}.")
        return value

    def get_int(self, name: str, default: int) -> int:
        """Return an integer."""
        number: int = self.get_typed(name, default)
        return number

    def get_choice(self, name: str, default: str, known: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what a name stands for
        """Return what a string value maps to."""
        value = self.get_typed(name, default)
        if value not in known:
            raise StoreError(
                f"{self.source!r} has {name} = {_short(value)}, which is not supported; {did_you_mean(value, known)}"
            )
        return known[value]

    def expect(self, name: str, *allowed: object) -> None:
        """Raise StoreError for a value other than those allowed; the key may be absent."""
        value = self.get(name, allowed[0])
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise StoreError(
                f"{self.source!r} has {name} = {_short(value)}, which is not supported; only {allowed[0]!r} is."
            )

    def reject_unused(self, ignored: Collection[str]) -> None:
        """Raise StoreError for keys that were neither read nor are known to have no effect."""
        for name in OFF:
            if self.get(name):
                raise StoreError(f"{self.source!r} has {name} = {_short(self.table[name])}, which is not supported.")
        for name, value in self.table.items():
            if name not in {*self.used, *ignored, *self.ignore} and name not in IGNORED_KEYS | GENERATION_KEYS:
                raise StoreError(
                    f"{self.source!r} has {name} = {_short(value)}, which is unknown and may change the results; "
                    f"if it does not, load with ignore=[{name!r}]."
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
