"""A served model: its name, its engine, and the encoding of prompts within its context length."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from glasshouse import hub
from glasshouse.config import JsonDict, did_you_mean
from glasshouse.errors import InputError
from glasshouse.generation import MAX_SLOTS, Engine, choose_slots
from glasshouse.generation.engine.inference_model import Weights
from glasshouse.generation.rules import Rule
from glasshouse.inspection import SteeringVector
from glasshouse.inspection.linear_probe import LinearProbe
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.layers import lora
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.generation_config import read_token_rules
from glasshouse.models.prompt import encode_prompt, end_of_turn_ids
from glasshouse.serve.schema.errors import ApiError
from glasshouse.text import Tokenizer
from glasshouse.text.token_text import max_token_bytes

Made = TypeVar("Made", SteeringVector, LinearProbe)

MAX_LEN = 8192  # tokens of a sequence by default, where a model could take more: each slot reserves memory for them
SLOTS_CPU = 32


class ServedModel:
    """A model that requests name, with its tokenizer and engine; an encoder has no engine, and embeds only.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=270)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=270)).eval()
    >>> served = ServedModel("tiny", model, tok, slots=2, max_len=64)
    >>> served.fit([1, 2, 3], max_tokens=None)
    61
    """

    def __init__(
        self,
        name: str,
        model: Model,
        tok: Tokenizer | None,
        *,
        slots: int | None = None,
        max_len: int | None = None,
        weights: Weights = "copy",
        compile: bool = False,  # noqa: A002 (torch's word)
        batch_invariant: bool = False,
        steering: Mapping[str, SteeringVector] | None = None,
        probes: Mapping[str, LinearProbe] | None = None,
        rules: Sequence[Rule] = (),  # of every request
    ) -> None:
        self.name, self.model, self.tok, self.rules = name, model, tok, tuple(rules)
        self.max_len = max_len or min(model.spec.max_len, MAX_LEN)
        self._token_bytes = None if tok is None else max_token_bytes(tok)
        self.engine: Engine | None = None
        self._target_start = 0  # tokens of a target before the generated ones
        if isinstance(model, Encoder):
            return
        source_len = self.max_len if isinstance(model, Seq2Seq) else 0
        if isinstance(model, Seq2Seq):
            self._target_start = 1 + len(read_token_rules(model).forced_prefix)
        most = MAX_SLOTS if model.token_embedding.table.weight.is_cuda else SLOTS_CPU
        self.engine = Engine(
            model,
            tok,
            slots=slots or choose_slots(model, self.max_len, source_len, most),
            max_len=self.max_len,
            source_len=source_len or None,
            weights=weights,
            compile=compile,
            batch_invariant=batch_invariant,
            steering=steering,
            probes=probes,
        )

    @property
    def chats(self) -> bool:
        """Whether there is a chat template, and a decoder to continue it."""
        return isinstance(self.model, Decoder) and self.tok is not None and self.tok.chat_template is not None

    @property
    def embeds(self) -> bool:
        """Whether texts can be embedded."""
        return isinstance(self.model, Encoder | Decoder) and self.tok is not None

    def generator(self) -> Engine:
        """Return the engine; raise for a model that does not generate."""
        if self.engine is None:
            raise ApiError(
                f"{self.name!r} is an encoder, which does not generate; ask for embeddings.", param="model"
            )
        return self.engine

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt; raise for one that by its length alone cannot fit."""
        if isinstance(prompt, str):
            self.check_least_tokens(prompt)
        return encode_prompt(prompt, self.tok, self.model.spec)

    def encode_chat(
        self, messages: Sequence[JsonDict], add_generation_prompt: bool = True, tools: Sequence[JsonDict] = ()
    ) -> list[int]:
        """Return the ids of a conversation, up to where the reply begins."""
        if not self.chats or self.tok is None:
            raise ApiError(
                f"{self.name!r} has no chat template: it was not trained on conversations; use /v1/completions, or "
                "fine-tune it by `glasshouse train finetune-chat`.",
                param="model",
            )
        return self.tok.encode_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools).ids

    def least_tokens(self, *texts: str) -> int:
        """Return how many tokens texts have at least, by their bytes; 0 where the tokenizer allows no such bound."""
        if self._token_bytes is None:
            return 0
        return -(-sum(len(text.encode("utf-8", "replace")) for text in texts) // self._token_bytes)

    def check_least_tokens(self, *texts: str) -> None:
        """Raise for texts that cannot fit, before they are tokenized, which may take seconds."""
        if (least := self.least_tokens(*texts)) > self.max_len:
            raise self._too_long(f"the prompt has at least {least} tokens", "shorten it")

    def end_of_turn(self) -> tuple[int, ...]:
        """Return the token that ends a reply in a chat."""
        return () if self.tok is None else end_of_turn_ids(self.tok)

    def fit(self, ids: Sequence[int], max_tokens: int | None, default: int | None = None) -> int:
        """Return how many tokens to generate; raise where they exceed the context length: nothing is truncated.

        Without `max_tokens` it is `default`, or else as many as fit.
        """
        used = self._target_start or len(ids)
        room = self.max_len - used
        source_fits = not self._target_start or len(ids) <= self.max_len
        if not source_fits or room < 0 or (room == 0 and max_tokens != 0):
            raise self._too_long(f"the prompt has {len(ids)} tokens", "shorten it")
        if max_tokens is not None and max_tokens > room:
            asked = f"the prompt has {used} tokens and the output up to {max_tokens}, {used + max_tokens} in total"
            raise self._too_long(asked, "shorten the prompt, or generate fewer tokens")
        return max_tokens if max_tokens is not None else room if default is None else min(default, room)

    def _too_long(self, what: str, advice: str) -> ApiError:
        message = f"{what}, but the context length of {self.name!r} is {self.max_len} tokens; {advice}."
        return ApiError(message, code="context_length_exceeded", param="messages" if self.chats else "prompt")


def assign(kind: str, made: Mapping[str, Made], models: Sequence[Model]) -> list[dict[str, Made]]:
    """Return the steering vectors or probes of each model: those made for it; raise for one of none of them."""
    prints = [model_fingerprint(model) for model in models] if made else [""] * len(models)
    for name, one in made.items():
        if one.fingerprint not in prints:
            raise InputError(
                f"the {kind} {name!r} was made for another model, whose weights differ; make one for a model that is "
                "served."
            )
    return [{name: one for name, one in made.items() if one.fingerprint == own} if made else {} for own in prints]


def assign_rules(rules: Sequence[Rule], probes: Sequence[Collection[str]]) -> list[list[Rule]]:
    """Return the rules of each model, whose probes have these names; raise for a rule of none of them.

    >>> [len(rules) for rules in assign_rules([Rule("anger", 1.0, "stop")], [["anger", "joy"], []])]
    [1, 0]
    """
    known = sorted({name for names in probes for name in names})
    for rule in rules:
        if rule.probe not in known:
            advice = did_you_mean(rule.probe, known) if known else "there is none."
            raise InputError(f"a rule names the probe {rule.probe!r}, which is not there; {advice}")
    return [[rule for rule in rules if rule.probe in names] for names in probes]


def load_models(
    arguments: Sequence[str], *, device: str, revision: str | None = None
) -> list[tuple[str, Model, Tokenizer | None]]:
    """Load models as `glasshouse serve` names them, and return their names: MODEL, NAME=MODEL or NAME=MODEL+ADAPTER.

    An adapter, a folder that PEFT wrote, is merged into the weights. Models of one base share the other weights.
    """
    bases: dict[str, tuple[Model, Tokenizer | None]] = {}
    found: list[tuple[str, Model, Tokenizer | None]] = []
    for argument in arguments:
        name, base, adapter = _split(argument)
        if base not in bases:
            bases[base] = hub.load(base, device=device, revision=revision)
        model, tok = bases[base]
        model = clone_sharing_parameters(model)
        if adapter:
            hub.load_adapter(model, adapter)
            lora.merge(model)
        found.append((name, model.eval(), tok))
    return found


def _split(argument: str) -> tuple[str, str, str]:
    """Return name, model and adapter of an argument; the name is by default that of the adapter or the model."""
    name, separator, rest = argument.partition("=")
    path = rest if separator else argument
    base, _, adapter = path.partition("+")
    if Path(path).is_dir():  # a folder whose name has a plus
        base, adapter = path, ""
    if not separator:
        name = adapter or base
        name = Path(name).name if Path(name).is_dir() else name
    if not name:
        raise InputError(f"{argument!r} has no name; give NAME=MODEL.")
    return name, base, adapter
