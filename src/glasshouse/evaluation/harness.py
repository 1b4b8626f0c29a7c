"""Models and tasks of EleutherAI's evaluation harness, lm-eval, which is an extra."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glasshouse import hub
from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.generation.engine.capacity import choose_prefill_chunk
from glasshouse.generation.offline import generate_requests
from glasshouse.generation.prompt_logprobs import prompt_logprobs
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.validation import check_model
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.models import Decoder, Model, check_tokenizer
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.training import ProgressCallback, no_progress

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise InputError("tasks need lm-eval; install it with pip install 'glasshouse[lm-eval]'.") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_GEN_TOKS = 256  # new tokens where a task names no number, as in lm-eval's own models


@register_model("glasshouse")
class GlasshouseLM(TemplateLM):  # type: ignore[misc]  # Any, as lm-eval may be missing
    """A decoder as a model of lm-eval, for `lm_eval.simple_evaluate(GlasshouseLM(model, tok), tasks=["arc_easy"])`.

    Instead of the model it takes what `gh.load` does, and its name in lm-eval is "glasshouse". Edits of `gh.edit`
    around the evaluation take effect. Texts of similar lengths are scored in one forward pass, and generated texts
    come from `gh.Engine`. As in lm-eval's model for transformers, special tokens that are spelled out in a text are
    special tokens, and what does not fit into the model's max_len is cut on the left.
    """

    def __init__(
        self, model: Model | str | Path, tok: Tokenizer | None = None, *, progress: ProgressCallback = no_progress
    ) -> None:
        super().__init__()
        if isinstance(model, str | Path):
            model, tok = hub.load(model)
        if not isinstance(model, Decoder):
            raise InputError(f"the model is of type {type(model).__name__}, but tasks are for decoders; give one.")
        check_model(model)
        if tok is None:
            raise InputError(
                "there is no tokenizer, but tasks are texts; give tok, or a folder with a tokenizer.json."
            )
        check_tokenizer(model, tok)
        self.model, self.tok, self._progress = model, tok, progress
        self.max_length = model.spec.max_len

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return next((one for one in (self.tok.special_id("eos"), *self.model.spec.end_ids) if one is not None), None)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        known = (self.tok.special_id("bos"), self.eot_token_id, self.model.spec.start_id)
        if (found := next((one for one in known if one is not None), None)) is None:
            raise InputError(
                "a text of the task has nothing before it, and the tokenizer has no bos or eos token to stand there; "
                "set one in its tokenizer_config.json."
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests knows the tokenizer by."""
        return self.tok.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, which is part of lm-eval's results."""
        return self.tok.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text; without a generation prompt its last message is to be continued."""
        encoded = self.tok.encode_chat(chat_history, add_generation_prompt=add_generation_prompt)
        text = self.tok.decode(encoded.ids)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Encode a text, whose special tokens are not added twice."""
        if add_special_tokens is None:
            bos = self.tok.special_tokens.get("bos")
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tok.encode(string, add_special_tokens, parse_special_tokens=True)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-probability of continuations of contexts, and whether greedy decoding generates them."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of continuations, and whether they are what greedy decoding generates."""
        texts, starts = [], []
        for _request, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InputError(
                    f"an answer of the task has {len(continuation)} tokens, but the model's max_len is "
                    f"{self.max_length}; choose a model with a longer one."
                )
            text = [*context, *continuation][-(self.max_length + 1) :]
            texts.append(text)
            starts.append(len(text) - len(continuation))
        self._warn_of_cuts(sum(len(one) + len(other) > self.max_length + 1 for _, one, other in requests))
        self._check_edits()
        with eval_mode(self.model):
            found = prompt_logprobs(
                self.model,
                texts,
                top=1,
                starts=starts,
                chunk=choose_prefill_chunk(self.model),
                progress=self._stage("scoring", len(texts)),
            )
        return [
            (sum(one.logprobs), [token for ((token, _),) in one.top] == text[start:])
            for one, text, start in zip(found, texts, starts, strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts; long ones in windows of max_len that do not overlap."""
        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the texts generated after contexts, each up to the first of its stop strings."""
        self._check_edits()
        alike: dict[str, list[int]] = {}  # requests by their parameters
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in alike.values():
            options = self._sampling_params(requests[numbers[0]].args[1])
            room = self.max_length - options.max_new_tokens
            if room < 1:
                raise InputError(
                    f"the task generates up to {options.max_new_tokens} tokens, but the model's max_len is "
                    f"{self.max_length}, prompt included; set max_gen_toks in its generation_kwargs."
                )
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            self._warn_of_cuts(sum(len(prompt) > room for prompt in prompts))
            found = generate_requests(
                self.model,
                self.tok,
                [prompt[-room:] for prompt in prompts],
                options,
                progress=self._stage("generating", len(prompts) * options.max_new_tokens),
            )
            for number, request in zip(numbers, found, strict=True):
                texts[number] = request.completions()[0].text
        return texts

    def _sampling_params(self, gen_kwargs: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters that a task's generation_kwargs ask for."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
        settings["max_new_tokens"] = settings.pop("max_gen_toks")
        settings["stop"] = [one for one in settings.pop("until") if one]
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        if self.eot_token_id is not None:
            settings["stop_token_ids"] = [self.eot_token_id]
        return SamplingParams.parse(settings)

    def _check_edits(self) -> None:
        """Raise for edits that mean something else in each request."""
        if edited := next((one.selection.name for one in hook_manager_of(self.model).hooks if one.by_position), None):
            raise InputError(
                f"the edit of {edited} is of some positions, but a task's are edited at all; leave it out."
            )
        check_model(self.model)

    def _warn_of_cuts(self, count: int) -> None:
        if count:
            warnings.warn(
                f"{count:,} texts of a task are longer than the model's max_len of {self.max_length:,}; they were "
                "cut on the left.",
                stacklevel=2,
            )

    def _stage(self, name: str, total: int) -> Callable[[int], None]:
        done = 0

        def progress(new: int) -> None:
            nonlocal done
            done += new
            self._progress(name, done, total)

        return progress


@dataclass(frozen=True)
class TaskReport:
    """The metrics of a task, or of a group of tasks, by lm-eval's names for them, such as `acc,none`."""

    metrics: dict[str, float]
    n_fewshot: int | None  # examples in each prompt; None for a group, whose tasks may differ
    n_items: int
    n_evaluated: int


def evaluate_tasks(
    model: Model,
    tok: Tokenizer | None,
    tasks: str | Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    progress: ProgressCallback = no_progress,
) -> dict[str, TaskReport]:
    """Evaluate a decoder on tasks of lm-eval: names, groups, and patterns of names (`mmlu_*`).

    `include_path` is a folder of task files of your own, `limit` the number of items of each task, its first ones,
    and `num_fewshot` the number of examples in each prompt. Edits of `gh.edit` take effect.
    """
    lm = GlasshouseLM(model, tok, progress=progress)
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"there is no folder {str(include_path)!r}; name one with task files.")
    patterns = [tasks] if isinstance(tasks, str) else tasks
    manager = _manager(patterns, include_path)
    names = list(dict.fromkeys(name for pattern in patterns for name in _matching(pattern, manager)))
    random.seed(DEFAULT_RANDOM_SEED)  # both seeds as lm-eval's, by which some tasks choose their items
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        loaded = manager.load(names)
    except ValueError as error:
        raise InputError(f"the tasks {', '.join(names)} cannot be loaded: {error}.") from None
    for task in loaded["tasks"].values():
        fixed = task.get_config("num_fewshot")  # 0 stays, as in lm-eval: the task has no examples to show
        if fixed is None or (num_fewshot is not None and fixed != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return _reports(evaluate(lm, loaded, limit=limit, log_samples=False))


def _manager(patterns: Sequence[str], include_path: str | Path | None) -> TaskManager:
    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(pattern in own.all_subtasks for pattern in patterns):
            return own  # listing lm-eval's tasks takes ten seconds
    return TaskManager(include_path=None if include_path is None else str(include_path))


def _matching(pattern: str, manager: TaskManager) -> list[str]:
    """Return the task or group of this name, or the tasks of a pattern: not their groups, which have them again."""
    if not (names := manager.match_tasks([pattern])):
        raise InputError(f"there is no task {pattern!r} in lm-eval; {did_you_mean(pattern, manager.all_tasks)}")
    return [name for name in names if name == pattern or name in manager.all_subtasks]


def _reports(found: Mapping[str, Any]) -> dict[str, TaskReport]:
    """Return what an evaluation by lm-eval found."""
    reports = {}
    for name, values in found["results"].items():
        counts = [found["n-samples"][one] for one in _tasks_of(name, found["group_subtasks"])]
        reports[name] = TaskReport(
            {key: value for key, value in values.items() if "," in key and isinstance(value, float | int)},
            found["n-shot"].get(name),
            sum(one["original"] for one in counts),
            sum(one["effective"] for one in counts),
        )
    return reports


def _tasks_of(name: str, children: Mapping[str, list[str]]) -> list[str]:
    """Return the tasks of a group, or the task itself."""
    return [task for child in children.get(name, []) for task in _tasks_of(child, children)] or [name]
