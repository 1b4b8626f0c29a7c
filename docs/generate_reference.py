"""Writes docs/reference/settings.md and command-line.md from the program; `make docs` runs it.

The meaning of a setting is the comment at its field: at the end of its last line, or in the lines above it. A unit
stands first, in brackets: `seq_len: int = 256  # [tokens] length of a sequence`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer.main

import glasshouse as gh
from glasshouse import cli, config, registry
from glasshouse.training import run as settings

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py; `make docs` writes it again. -->\n"
PLAIN = {int: "integer", float: "number", bool: "true or false", str: "string"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a settings dataclass, as the reference shows it."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str


@functools.cache
def comments(owner: type) -> dict[str, str]:
    """Return the comment at each field that a class declares itself.

    >>> comments(settings.Data)["seq_len"][:28]
    '[tokens] length of a sequenc'
    """
    source = textwrap.dedent(inspect.getsource(owner))
    found = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa"))
    }
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = []
            for number in range(node.lineno - 1, 0, -1):
                if not lines[number - 1].strip().startswith("#"):
                    break
                above.append(found.get(number, ""))
            after = found.get(node.end_lineno or node.lineno, "").partition("  # ")[0]
            texts[node.target.id] = " ".join(filter(None, [*reversed(above), after]))
    return texts


def fields(owner: type) -> list[Setting]:
    """Return the settings of a dataclass, its parents' included."""
    meanings: dict[str, str] = {}
    for parent in reversed(owner.__mro__):
        if dataclasses.is_dataclass(parent):
            meanings |= comments(parent)
    hints = get_type_hints(owner)
    result = []
    for field in dataclasses.fields(owner):
        unit, meaning = re.fullmatch(r"(?:\[(\w+)\] )?(.*)", meanings[field.name]).groups()  # type: ignore[union-attr]
        shown = "required" if field.default is dataclasses.MISSING else f"`{default(field.default)}`"
        result.append(
            Setting(field.name, type_name(hints[field.name]), shown, unit or "", meaning.replace("None:", "none:"))
        )
    return result


def default(value: object) -> str:
    """Return a default as it is written in TOML; a setting without one is not written."""
    if value is None:
        return "none"
    if config.is_choice(value):
        table = {name: one for name, one in config.dump(value).items() if name != "kind"}
        usual = {field.name: field.default for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        other = {name: one for name, one in table.items() if usual[name] != getattr(value, name)}
        inner = "".join(f", {name} = {default(one)}" for name, one in other.items())
        return f'{{ kind = "{value.kind}"{inner} }}' if inner else f'"{value.kind}"'  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value):  # a table of its own
        inner = ", ".join(
            f"{field.name} = {default(getattr(value, field.name))}" for field in dataclasses.fields(value)
        )
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(default, value))}]"
    return config.to_toml({"x": value}).removeprefix("x = ").strip()


def type_name(hint: Any) -> str:  # noqa: ANN401 - a type
    """Return the type of a setting in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_name(option) for option in get_args(hint) if option is not NoneType)
    if registry.is_sort(get_origin(hint) or hint):
        return " or ".join(map(type_name, alternatives(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{option}"`' for option in get_args(hint))
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return f"list of {type_name(item)}" if registry.is_sort(item) else f"list of {type_name(item)}s"
    if dataclasses.is_dataclass(hint) and not config.is_choice(hint):
        return f"[table](#{anchor(hint)})"
    if dataclasses.is_dataclass(hint):
        return f"[`{hint.kind}`](#{anchor(hint)})"  # type: ignore[attr-defined]
    return PLAIN[hint]


def alternatives(hint: Any) -> list[Any]:  # noqa: ANN401 - types
    """Return the types that a union, or a sort of kinds, stands for."""
    if registry.is_sort(sort := get_origin(hint) or hint):
        return list(sort.kinds.values())
    if get_origin(hint) is tuple and registry.is_sort(get_args(hint)[0]):  # a list of choices
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [kind for option in get_args(hint) if option is not NoneType for kind in alternatives(option)]
    return [hint]


def anchor(owner: type) -> str:
    """Return the anchor of a choice: `none` is the name of a position, a scaling and a head."""
    return owner.__name__.lower()


def table(owner: type) -> Iterator[str]:
    """Yield the lines of a table of settings."""
    rows = fields(owner)
    if not rows:
        yield "It has no settings."
        return
    with_unit = any(row.unit for row in rows)
    yield f"| setting | type | default |{' unit |' * with_unit} meaning |"
    yield f"|---|---|---|{'---|' * with_unit}---|"
    for row in rows:
        cells = [f"`{row.name}`", row.type, row.default, *([row.unit] if with_unit else []), row.meaning]
        yield row_of(cells)


def row_of(cells: Iterable[str]) -> str:
    r"""Return a row of a Markdown table.

    >>> print(row_of(["a|b", "c"]))
    | a\|b | c |
    """
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def first_line(documented: object) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def settings_page() -> str:
    """Return the page of all settings."""
    lines = [NOTE, "# Settings", "", *INTRODUCTION.splitlines(), ""]
    specs = get_args(gh.spec.Spec)
    shared = [field.name for field in dataclasses.fields(gh.spec.TransformerSpec)]
    sections: list[tuple[str, type]] = [("[data]", settings.Data), ("[train]", settings.Train)]
    lines += ["## [model]", "", *MODEL.splitlines(), "", *table(gh.spec.TransformerSpec), ""]
    for spec in specs:
        own = [line for line in table(spec) if not any(line.startswith(f"| `{name}` ") for name in shared)]
        lines += [f"### {spec.kind} {{#{anchor(spec)}}}", "", first_line(spec), "", *own, ""]
    for title, owner in sections:
        lines += [f"## {title}", "", first_line(owner), "", *table(owner), ""]
    parallel = gh.training.Parallel
    title = f"### [train.parallel] {{#{anchor(parallel)}}}"
    lines += [title, "", first_line(parallel), "", *table(parallel), ""]
    lines += ["## Choices", "", CHOICES, ""]
    groups: dict[str, dict[type, None]] = {}
    for owner in (*specs, settings.Data, settings.Train):
        for field in dataclasses.fields(owner):
            hint = get_type_hints(owner)[field.name]
            for option in filter(config.is_choice, filter(dataclasses.is_dataclass, alternatives(hint))):
                path = f"{'train' if owner is settings.Train else 'model'}.{field.name}"
                groups.setdefault(path, {}).update(dict.fromkeys([option]))
                for inner in dataclasses.fields(option):
                    deeper = get_type_hints(option)[inner.name]
                    if NoneType not in get_args(deeper) and dataclasses.is_dataclass((*get_args(deeper), None)[0]):
                        groups.setdefault(f"{path}.{inner.name}", {}).update(dict.fromkeys(get_args(deeper)))
    for path, options in groups.items():
        lines += [f"### {path}", ""]
        for option in options:
            lines += [f"#### {option.kind} {{#{anchor(option)}}}", "", first_line(option), "", *table(option), ""]
    lines += [
        "## Presets",
        "",
        PRESETS,
        "",
        "| preset | kind | layers | d_model | heads | KV heads | d_ff | vocabulary ",
    ]
    lines[-1] += "| max_len | parameters | position | norm | feed-forward |"
    lines.append("|---" * 13 + "|")
    for name in gh.presets():
        s = gh.preset(name)
        sizes = (s.n_layers, s.d_model, s.n_heads, s.n_kv_heads, s.d_ff, s.vocab_size, s.max_len)
        numbers = [f"{size:,}" for size in (*sizes, gh.count_parameters(s))]
        kinds = [s.position.kind, f"{s.norm.kind}, {s.norm_placement}", s.feedforward.kind]
        lines.append(f"| {' | '.join([f'`{name}`', s.kind, *numbers, *kinds])} |")
    lines += ["", "## Recipes", "", RECIPES, ""]
    for path in sorted(settings.RECIPES.glob("*.toml")):
        head, _, body = path.read_text(encoding="utf-8").partition("[model]")
        says = " ".join(line.removeprefix("#").strip() for line in head.strip().splitlines())
        lines += [f"### {path.stem}", "", says, "", "```toml", f"[model]{body}".rstrip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = """
A run has three tables: `[model]`, `[data]` and `[train]`. They are set in a TOML file, or on the command line as
`key=value` with the table in front: `train.steps=2000`, `model.position.theta=500000`, `data.columns=en,de`. The
default `none` means that the setting is left out; of what a preset sets, a number is so left out again
(`model.logit_softcap=none`). An unknown setting is an error that names the nearest one.
""".strip()

MODEL = """
Either `from`, the folder or hub id of a model to fine-tune, and nothing else; or `preset`, the name of a
[preset](#presets), and any field below that is to differ; or `kind` (`decoder`, `encoder` or `seq2seq`) and all
fields without a default; or `depth`, [one number](../guides/own-corpus.md#one-dial) from which the others follow, and
any field that is to differ. The same fields are keyword arguments of [`gh.preset`](python-api/specs-and-models.md).

Fields of every kind of model:
""".strip()

CHOICES = """
A setting with several kinds is written as a table, `position = { kind = "rotary", theta = 500000 }`, or, if all else
keeps its default, as the name of the kind, `position = "rotary"`.
""".strip()

PRESETS = "`model.preset`, or `gh.preset(name)`. Norm: kind and placement."

RECIPES = f"""
`glasshouse train NAME`, or `gh.Run.load(name)`. Each is a run file in `src/glasshouse/training/recipes/`.
Without data of yours, {", ".join(f"`{task}` is [`{data}`](#{data})" for task, data in settings.TASKS.items())}.
""".strip()


def command_line_page() -> str:
    """Return the page of all commands."""
    lines = [NOTE, "# Command line", "", *COMMAND_LINE.splitlines(), ""]
    top = typer.main.get_command(cli.app)
    lines += ["## glasshouse", "", *options(top)]
    for name, command in commands(top, ""):
        lines += [f"## glasshouse {name}", "", *command_text(name, command)]
    return "\n".join(lines).rstrip() + "\n"


COMMAND_LINE = """
`glasshouse` and `python -m glasshouse` are the same program. `glasshouse COMMAND --help` prints what stands here.
""".strip()


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's, of typer's copy or another
    """Yield the name and the command of every command of a group, nested ones in full."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def command_text(name: str, command: Any) -> Iterator[str]:  # noqa: ANN401 - click's
    """Yield the lines about a command: what it does, how it is called, its arguments and options."""
    words = [metavar(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    yield from ("```text", " ".join(["glasshouse", name, "[OPTIONS]", *words]), "```", "")
    says = escaped(inspect.cleandoc(command.help or ""))
    yield from (re.sub(r"\x08\n((?:.+\n?)+)", r"```text\n\1\n```", says), "")  # click does not wrap these lines
    yield from options(command)
    if command.epilog:
        text = command.epilog.removeprefix("Example: ")
        yield from (f"Example: `{text}`", "")


def options(command: Any) -> Iterator[str]:  # noqa: ANN401 - click's
    """Yield the table of arguments and options of a command."""
    yield "| argument or option | default | meaning |"
    yield "|---|---|---|"
    hints = get_type_hints(inspect.unwrap(command.callback))
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            value = ""
        elif isinstance(shown := getattr(parameter, "show_default", None), str):
            value = shown
        else:
            given = parameter.default
            value = "" if given in (None, False, "", ()) or parameter.required else f"`{given}`"
        if parameter.param_type_name == "argument":
            names = f"`{metavar(parameter)}`"
        else:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            names += " " * bool(found := choices(hints.get(parameter.name))) + ", ".join(found)
        cells = (names, escaped(value), escaped(parameter.help or ""))
        yield row_of(cells)
    yield ""


def metavar(argument: Any) -> str:  # noqa: ANN401 - click's
    """Return an argument as a usage line shows it."""
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def choices(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    """Return the values of a literal, also of an optional one."""
    options_ = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((get_args(option) for option in options_ if get_origin(option) is Literal), ())


def escaped(text: str) -> str:
    """Return help text as Markdown, in which *, < and [ would mean something."""
    return re.sub(r"([*<\[\]])(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", text)


PAGES = {"settings.md": settings_page, "command-line.md": command_line_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
