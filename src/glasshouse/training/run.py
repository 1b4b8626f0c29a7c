"""Settings of a training run: the model, the data and how it is trained, from TOML and `key=value` overrides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from glasshouse import config, registry
from glasshouse.config import JsonDict, Settings, require
from glasshouse.data.builtin import builtin_dataset, builtin_datasets
from glasshouse.errors import ConfigError
from glasshouse.hub.run_checkpoints import RUN, is_run
from glasshouse.layers.lora import LoRA
from glasshouse.objectives.choice import ObjectiveChoice
from glasshouse.training import depth
from glasshouse.training.distributed.processes import Parallel
from glasshouse.training.logging.trackers import Tracker
from glasshouse.training.optimizer import AdamW, Optimizer
from glasshouse.training.schedule import WSD, Cosine, Schedule

RECIPES = Path(__file__).parent / "recipes"
OWN_TEXT = "stdlib"  # the recipe of text of yours, whose model and length give way to model.depth and train.minutes
TASKS = {"translate": "dates", "classify": "langid"}  # recipes by task, and what each learns without data of yours
DEFAULT_STEPS = 1000  # if neither steps, nor epochs, nor minutes are given
DEFAULT_WARMUP = 100  # steps; a run of less than ten times as many warms up for a tenth of them
LENGTHS = ("steps", "epochs", "minutes")
CHOSEN = ("steps", "batch_tokens", "optimizer", "schedule")  # by train.minutes, beside the model
FIRST_DEPTH = 4  # of the model that stands in for the one that train.minutes will choose
PROBE_NAMES = (
    "entropy",
    "induction",
    "previous_token",
    "resid_norms",
    "logit_lens",
)  # in training/logging/checkpoint_log.py


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model to fine-tune: `model.from`, a model or run folder or a hub id."""

    source: str

    def to_dict(self) -> JsonDict:
        """Return the table of settings."""
        return {"from": self.source}


@dataclass(frozen=True)
class NewModel:
    """A model to build: a preset with other fields of its spec, or the fields of a full spec.

    They are checked when the spec is made: vocabulary, special token ids and labels come from the data.
    """

    preset: str | None
    fields: JsonDict

    def to_dict(self) -> JsonDict:
        """Return the table of settings."""
        return {**({} if self.preset is None else {"preset": self.preset}), **self.fields}


def parse_model(table: Mapping[str, Any]) -> Pretrained | NewModel:
    """Parse the `model` table of a run file.

    >>> parse_model({"preset": "gpt2", "n_layers": 2})
    NewModel(preset='gpt2', fields={'n_layers': 2})
    >>> parse_model({"from": "runs/stdlib", "n_layers": 2})
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: model.from is given, so model.n_layers cannot be set; remove one of them.
    """
    if not {"preset", "kind", "from"} & table.keys():
        raise ConfigError("model has neither preset, nor from, nor the kind of a full spec; give one of them.")
    if "from" not in table:
        fields = {name: value for name, value in table.items() if name != "preset"}
        return NewModel(table.get("preset"), fields)
    if more := sorted(table.keys() - {"from"}):
        raise ConfigError(f"model.from is given, so model.{more[0]} cannot be set; remove one of them.")
    require(isinstance(table["from"], str), "model.from", table["from"], "the folder or the hub id of a model")
    return Pretrained(table["from"])


@dataclass(frozen=True)
class Data(Settings):
    """Training and validation data."""

    path: tuple[str, ...] = ("stdlib",)  # files, folders, globs, a prepared folder or a built-in dataset
    weights: tuple[int, ...] = ()  # how often an epoch reads each of `path`, such as 1,3; empty: once
    validation: tuple[str, ...] = ()  # likewise, for validation; empty: the built-in split, or a part of `path`
    val_fraction: float = 0.05  # fraction of `path` held out for validation, if it is split
    # kind of data; None: inferred from the model and the columns
    kind: Literal["text", "pairs", "labelled", "tagged", "chat", "preferences"] | None = None  # type: ignore[misc,assignment]
    columns: tuple[str, ...] = ()  # of tables; a.b: a field of a; 1,2: without a header; empty: the usual of the kind
    separator: str | None = None  # separator of documents in a plain text file; None: each file is one document
    errors: Literal["strict", "replace"] = "strict"  # on invalid UTF-8: stop, or decode to U+FFFD
    tokenizer: str | None = None  # tokenizer folder; None: the base model's, or train a new one of vocab_size
    vocab_size: int = 4096  # [tokens] size of the vocabulary of a new tokenizer
    seq_len: int = 256  # [tokens] length of a sequence; longer items are dropped, or truncated if labelled

    def check(self) -> None:
        require(len(self.path) > 0, "data.path", self.path, "a path or the name of a built-in dataset")
        if self.weights:
            wanted = f"one whole number for each of data.path, which has {len(self.path)}, each at least 1"
            fits = len(self.weights) == len(self.path) and min(self.weights) > 0
            require(fits, "data.weights", self.weights, wanted)
        require(0 < self.val_fraction < 1, "data.val_fraction", self.val_fraction, "above 0 and below 1")
        require(self.seq_len > 0, "data.seq_len", self.seq_len, "at least 1")
        require(self.vocab_size > 0, "data.vocab_size", self.vocab_size, "at least 1")


def default_schedule(steps: int) -> Schedule:
    """Return the schedule of a run that names none.

    >>> default_schedule(50), default_schedule(5000)
    (Cosine(warmup=5, final_factor=0.1), Cosine(warmup=100, final_factor=0.1))
    """
    return Cosine(warmup=min(DEFAULT_WARMUP, steps // 10))


@dataclass(frozen=True)
class Train(Settings):
    """Optimization, precision, evaluation and checkpoint settings."""

    # training objective; None: by the kinds of model and data, such as next-token prediction for a decoder on text
    objective: ObjectiveChoice | None = field(default=None, metadata={"omit_default": True})
    steps: int | None = None  # [steps] None: 1,000, or from `epochs`; can be raised on resume if no past lr changes
    epochs: float | None = None  # [epochs] passes over the training data, instead of `steps`
    # [minutes] chooses depth, batch and steps for the lowest loss in this time, everything included; beside `steps`,
    # their number is decided again when the learning rate begins to decay, to end on time
    minutes: float | None = None
    batch_tokens: int = 8192  # [tokens] per step, over all micro-batches
    grad_accum: int = 0  # micro-batches per step (gradient accumulation); 0: as many as memory requires
    optimizer: Optimizer = AdamW()  # optimizer and its settings
    lr: float | None = None  # peak learning rate; None: the optimizer's
    schedule: Schedule | None = None  # None: cosine, with a warm-up of a tenth of the steps and at most 100
    grad_clip: float = 1.0  # maximum gradient norm; 0: no clipping
    label_smoothing: float = 0.0  # label smoothing: probability mass spread evenly over all classes
    ema: float = 0.0  # decay of the exponential moving average of the weights; 0: no EMA
    lora: LoRA | None = None  # train low-rank adapters (LoRA) and merge them in the end; None: train all weights
    freeze: tuple[str, ...] = ()  # module names to freeze; * matches any part of a name
    activation_checkpointing: bool = False  # activation checkpointing: recompute activations, save memory
    seed: int = 0  # random seed of weights, data order and dropout
    device: str = "auto"  # cpu, cuda or mps; auto: the fastest
    # mixed precision; auto: bfloat16 on CUDA, or else float16; float32 elsewhere; fp8: bfloat16, linear layers in fp8
    precision: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    # torch.compile of blocks; auto: on CUDA, if it saves more time than it takes; small steps by CUDA graphs
    compile: Literal["auto", "yes", "no"] = "auto"
    parallel: Parallel = field(default=Parallel(), metadata={"omit_default": True})  # how processes share the model
    workers: int = 1  # threads that prefetch batches; 0: none

    # [steps] between validations; 0: ten times per run (of its initial steps, if raised), less often in runs on a GPU
    # of which writing ten checkpoints would take more than a fifth
    eval_every: int = 0
    eval_samples: int = 0  # [samples] per validation, at most; 0: as many as 1% of the steps (likewise) process
    patience: int = 0  # [validations] without improvement before early stopping; 0: never
    save_every: int = 0  # [steps] between checkpoints; 0: ten times per run (likewise)
    keep_checkpoints: int = 2  # latest checkpoints kept, in addition to the best
    probes: tuple[str, ...] | None = None  # probes computed at each checkpoint; None: all that apply to the model
    sample_prompts: int = 3  # validation prompts to sample from at each checkpoint; 0: none
    keep_snapshots: int = 12  # weights-only snapshots of deleted checkpoints, spread evenly over the run; 0: none
    on_nonfinite: Literal["stop", "skip"] = "stop"  # on a NaN or infinite loss: stop, or roll back and skip the batch
    # experiment trackers that get the metrics, such as wandb,mlflow; none: TensorBoard if it is installed
    trackers: tuple[Tracker, ...] | None = None
    out: str = ""  # run folder; "": runs/NAME

    def check(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"train.steps is {self.steps} and train.epochs is {self.epochs:g}; give one of them.")
        if self.epochs is not None and self.minutes is not None:
            raise ConfigError(
                f"train.epochs is {self.epochs:g} and train.minutes is {self.minutes:g}; give one of them."
            )
        if self.steps is self.epochs is self.minutes is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        for name in ("batch_tokens", "keep_checkpoints"):
            require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "at least 1")
        require(self.steps is None or self.steps > 0, "train.steps", self.steps, "at least 1")
        require(self.epochs is None or 0 < self.epochs < math.inf, "train.epochs", self.epochs, "above 0")
        require(self.minutes is None or 0 < self.minutes < math.inf, "train.minutes", self.minutes, "above 0")
        counts = ("grad_accum", "workers", "eval_every", "eval_samples", "patience", "save_every", "sample_prompts")
        for name in (*counts, "keep_snapshots", "grad_clip", "seed"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("label_smoothing", "ema"):
            require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "at least 0 and below 1")
        require(self.lr is None or self.lr > 0, "train.lr", self.lr, "above 0")
        if self.minutes is not None and self.schedule is not None:
            rule = "wsd beside train.minutes, as its decay can begin at any step"
            require(isinstance(self.schedule, WSD), "train.schedule.kind", self.schedule.kind, rule)
        if self.steps is not None:
            self._check_warmup(self.steps)
        if unknown := [name for name in self.probes or () if name not in PROBE_NAMES]:
            known = config.did_you_mean(unknown[0], PROBE_NAMES)
            raise ConfigError(f"train.probes has {unknown[0]!r}, which is unknown; {known}")

    def _check_warmup(self, steps: int) -> None:
        schedule = self.schedule or default_schedule(steps)
        require(schedule.warmup <= steps, "train.schedule.warmup", schedule.warmup, f"at most train.steps = {steps}")
        object.__setattr__(self, "schedule", schedule)

    def planned(self, samples: int, batch_size: int) -> tuple[int, Schedule]:
        """Return the number of steps and the schedule; `epochs` are converted with the number of samples.

        A warm-up longer than the run is shortened to a tenth of it.

        >>> Train(epochs=2.5).planned(samples=1000, batch_size=32)
        (79, Cosine(warmup=7, final_factor=0.1))
        """
        steps = self.steps or DEFAULT_STEPS
        if self.epochs is not None:
            steps = math.ceil(self.epochs * samples / batch_size)
        schedule = self.schedule or default_schedule(steps)
        return steps, schedule if schedule.warmup <= steps else replace(schedule, warmup=steps // 10)

    def chosen_optimizer(self) -> Optimizer:
        """Return the optimizer with `lr` applied."""
        return self.optimizer if self.lr is None else replace(self.optimizer, lr=self.lr)


@dataclass(frozen=True)
class Run:
    """Settings of a run.

    >>> run = Run.load("stdlib", "train.steps=100", "model.n_layers=2")
    >>> run.train.steps, run.model.fields["n_layers"], run.train.out
    (100, 2, 'runs/stdlib')
    >>> Run.load("stdlib", "train.step=100")
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: train.step is not a setting of 'Train'; did you mean steps?
    """

    model: Pretrained | NewModel
    data: Data = Data()
    train: Train = Train()
    notes: tuple[str, ...] = field(default=(), compare=False)  # adjustments made while loading; logged at the start
    # the model and what is set of `CHOSEN`, while train.minutes has not chosen yet; the model then stands in for it
    unchosen: JsonDict | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):  # as the siblings take tables too
            object.__setattr__(self, "model", parse_model(self.model))
        if self.train.minutes is not None and self.train.steps is None and self.unchosen is None:
            raise ConfigError(
                f"train.minutes is {self.train.minutes:g}, which chooses the model too; make the run by Run.load or "
                "Run.from_dict."
            )

    @classmethod
    def load(cls, source: str | Path, *settings: str) -> Run:
        """Load a recipe by name, a TOML file or a run folder, with `key=value` overrides.

        A recipe with other data than its own writes to `runs/` and the name of that data, unless train.out is given,
        and keeps its own kind of data. If train.steps is overridden with fewer steps than the file's warm-up, the
        warm-up is shortened in proportion, or to a tenth of them where the file has train.epochs.

        >>> run = Run.load("dates", "data.path=my/pairs.tsv", "data.columns=en,de")
        >>> run.train.out, run.data.kind, run.data.columns
        ('runs/pairs', 'pairs', ('en', 'de'))
        """
        path = Path(source)
        if is_run(path):
            path /= RUN
        name = str(source)
        if (recipe := find_recipe(name)) is not None:
            table = config.read(recipe)
            given = config.override(table, settings)
            if name == OWN_TEXT and _chooses_model(settings):
                table = {"data": table["data"]}
                given = config.override(table, settings)
            if name in TASKS and "path" not in given.get("data", {}):
                table = config.read(RECIPES / f"{TASKS[name]}.toml")
                given = config.override(table, settings)
            given, name = _named(name, table, given)
        elif path.suffix == ".toml":
            table, name = config.read(path), path.stem
            given = config.override(table, settings)
        elif path.exists():
            raise ConfigError(
                f"{name!r} is not a TOML file with the settings of a run; to train on it, give data.path={name}."
            )
        else:
            raise ConfigError(f"there is no recipe or file {name!r}; {config.did_you_mean(name, recipes())}")
        if "from" in given.get("model", {}) and "from" not in table.get("model", {}):  # replaces the file's model
            old = table.get("model", {})
            given["model"] = {key: value for key, value in given["model"].items() if value != old.get(key)}
        _choose_length(table, given)
        note = _fit_warmup(table, given)
        run = cls.from_dict(given, name)
        return replace(run, notes=(note,)) if note else run

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], name: str = "run") -> Run:
        """Build a run from nested dictionaries."""
        for key, part in table.items():
            if key not in ("model", "data", "train"):
                raise ConfigError(
                    f"{key} is not a table of a run; {config.did_you_mean(key, ('model', 'data', 'train'))}"
                )
            if not isinstance(part, Mapping):
                raise ConfigError(f"{key} is {part!r}, but it must be a table of settings.")
        own, unchosen = table.get("train", {}), None
        if "minutes" in own and "steps" not in own:
            model_table = dict(table.get("model", {}))
            _check_unchosen(model_table, own["minutes"])
            unchosen = {"model": model_table, "train": {key: own[key] for key in CHOSEN if key in own}}
            table = {**table, "model": {"depth": FIRST_DEPTH, **model_table}}
        if "depth" in table.get("model", {}):
            table = depth.expand(table)
        model = parse_model(table.get("model", {}))
        data = config.parse(Data, table.get("data", {}), "data")
        train = config.parse(Train, table.get("train", {}), "train")
        return cls(model, data, train if train.out else replace(train, out=f"runs/{name}"), unchosen=unchosen)

    def to_dict(self) -> JsonDict:
        """Return the run as nested dictionaries, which `from_dict` loads."""
        model, train = self.model.to_dict(), config.dump(self.train)
        if self.unchosen is not None:
            model = self.unchosen["model"]
            train = {key: value for key, value in train.items() if key not in CHOSEN} | self.unchosen["train"]
        return {"model": model, "data": config.dump(self.data), "train": train}

    def choose(self, depth: int, batch_tokens: int, steps: int) -> Run:
        """Return the run with what train.minutes was to choose; what the user has set stays.

        >>> run = Run.load("stdlib", "train.minutes=10", "model.n_layers=5")
        >>> run = run.choose(depth=2, batch_tokens=2048, steps=600)
        >>> run.model.fields["d_model"], run.model.fields["n_layers"], run.train.steps, run.train.schedule.warmup
        (128, 5, 600, 30)
        """
        table = self.to_dict()
        table["model"] = {**table["model"], "depth": depth}
        table["train"] = {"batch_tokens": batch_tokens, **table["train"], "steps": steps}
        return replace(Run.from_dict(table), notes=self.notes)

    def differences(self, other: Run) -> list[str]:
        """Describe the settings of another run that differ and that may not change on resume."""
        return describe_differences(self.to_dict(), other.to_dict())


def _choose_length(file: JsonDict, given: JsonDict) -> None:
    """Let an override of one of `LENGTHS` replace another in the file."""
    before, after = file.get("train"), given.get("train")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    for one, other in itertools.permutations(LENGTHS, 2):
        if one in after and one not in before and other in before and after.get(other) == before[other]:
            del after[other]
    if (
        after.get("steps") != before.get("steps")
        and "minutes" in before
        and after.get("minutes") == before["minutes"]
    ):
        after.pop("minutes", None)  # steps that are raised end when they are done


def _chooses_model(settings: Iterable[str]) -> bool:
    """Whether settings are to set the sizes of the model."""
    match config.override({}, settings):
        case {"train": {"minutes": minutes, "steps": steps}}:
            raise ConfigError(f"train.steps is {steps} and train.minutes is {minutes}; give one of them.")
        case {"model": {"depth": _}} | {"train": {"minutes": _}}:
            return True
    return False


def _check_unchosen(model: JsonDict, minutes: object) -> None:
    """Refuse a model that is given where train.minutes is to choose one."""
    for name in ("preset", "kind", "from"):
        if name in model:
            raise ConfigError(
                f"train.minutes is {minutes}, which chooses the depth of a new decoder, but model.{name} is "
                f"{model[name]!r}; give train.steps or train.epochs for that model."
            )


def _fit_warmup(file: JsonDict, given: JsonDict) -> str:
    """Shorten the file's warm-up if `given` has fewer steps and the same schedule; return a note if it was."""
    match file.get("train"), given.get("train"):
        case {"schedule": {"warmup": int(warmup)} as schedule, **rest}, {"schedule": same, "steps": int(steps)}:
            usual = rest.get("steps", DEFAULT_STEPS)
            if same == schedule and steps < warmup and "epochs" in rest:
                same["warmup"], instead = steps // 10, f"train.epochs {rest['epochs']}"
            elif same == schedule and isinstance(usual, int) and 0 < steps < warmup <= usual:
                same["warmup"], instead = warmup * steps // usual, f"{usual}"
            else:
                return ""
            return (
                f"the warm-up is shortened from {warmup} steps to {same['warmup']}, as train.steps is {steps} "
                f"instead of {instead}"
            )
    return ""


def recipes() -> list[str]:
    """List the recipes: the built-in ones, by data and by task, and those of installed packages.

    >>> {"dates", "translate"} <= {*recipes()}
    True
    """
    own = {path.stem for path in RECIPES.glob("*.toml")} | TASKS.keys()
    return sorted(own | registry.entry_points(registry.RECIPES).keys())


def find_recipe(name: str) -> Path | None:
    """Return the file of a recipe, of ours before that of an installed package; None if there is none."""
    for own in (RECIPES / f"{one}.toml" for one in (name, TASKS.get(name, name))):
        if own.is_file():
            return own
    return None if name.endswith(".toml") else registry.load_entry_point(registry.RECIPES, name, Path)


def _named(recipe: str, table: JsonDict, given: JsonDict) -> tuple[JsonDict, str]:
    """Return a recipe with its overrides, and the name of its run: that of its data, if not the recipe's own."""
    chosen, own = (config.parse(Data, one.get("data", {}), "data") for one in (given, table))
    if chosen.path == own.path:
        return given, recipe
    kind = builtin_dataset(own.path[0]).kind if own.path[0] in builtin_datasets() else own.kind
    if chosen.kind is None and kind not in ("text", None) and chosen.path[0] not in builtin_datasets():
        given["data"]["kind"] = kind
    fixed = itertools.takewhile(lambda part: not {*"*?["} & {*part}, Path(chosen.path[0]).parts)
    data = Path(*fixed).resolve()
    return given, (data.name if data.is_dir() else data.name.strip(".").partition(".")[0]) or recipe


# Settings that may change on resume: none changes the result of a step; train.patience only when the run stops.
CHANGEABLE_ON_RESUME = {
    *("train.out", "train.keep_checkpoints", "train.save_every", "train.eval_every", "train.eval_samples"),
    *("train.patience", "train.probes", "train.sample_prompts", "train.keep_snapshots", "train.parallel.kind"),
    *("train.device", "train.compile", "train.grad_accum", "train.workers", "train.on_nonfinite", "train.trackers"),
    "train.parallel.tensor",
}


def describe_differences(before: JsonDict, after: JsonDict) -> list[str]:
    """Describe each setting that differs between two nested dicts, except those that may change on resume."""
    old, new = dict(config.flat(before)), dict(config.flat(after))
    keys = [key for key in {**old, **new} if key not in CHANGEABLE_ON_RESUME and old.get(key) != new.get(key)]
    return [f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}" for key in keys]


def _shown(value: object) -> str:
    return "not given" if value is None else repr(value)
