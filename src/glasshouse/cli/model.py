"""`glasshouse export` and `verify`: conversion to transformers, llama.cpp and ONNX, and numerical checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts

app = typer.Typer()

MODEL_HELP = "A model or run folder, a hub id, or a bundled model (python-3m, english-4m, dates-1m)."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Ignore = Annotated[
    list[str] | None, typer.Option(help="Unknown keys of config.json to ignore, as a,b; can be repeated.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]

Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="The device to run on; auto picks the fastest.")
]


@app.command(
    epilog="Example: glasshouse export runs/stdlib published, or glasshouse export runs/stdlib model.gguf --type q8_0"
)
def export(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Argument(help="The folder, .gguf or .onnx file to write; an earlier export there is replaced.")
    ],
    to: Annotated[
        Literal["hf", "gguf", "onnx"] | None,
        typer.Option(
            help="hf: for transformers; gguf: for llama.cpp; onnx: for ONNX Runtime (default: by the name of OUT)."
        ),
    ] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0", "q4_0"], typer.Option("--type", help="Of the matrices in a GGUF file.")
    ] = "f16",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Export a model for transformers, llama.cpp (.gguf) or ONNX Runtime (.onnx), or say what cannot be expressed."""
    kind, tok = gh.hub.convert(
        model,
        out,
        gguf=dtype if (to or out.suffix[1:]) == "gguf" else None,
        onnx=(to or out.suffix[1:]) == "onnx",
        revision=revision,
        ignore=texts.listed(ignore),
    )
    print(f"{out}: a model of type {kind}, {'with' if tok else 'without'} a tokenizer")


@app.command(epilog="Example: glasshouse verify runs/stdlib")
def verify(model: ModelArgument, revision: Revision = None, ignore: Ignore = None) -> None:
    """Run a model on all kernels and code paths, compare the results, and write verified.json; exit 1 on failure."""
    with screen.waiting("loading and checking"):
        checks = gh.evaluation.verify(model, revision=revision, ignore=texts.listed(ignore))
    rows = [
        (check.name, "not compared", "", check.reason)
        if check.difference is None
        else (check.name, f"{check.difference:.1e}", f"{check.limit:.0e}", "ok" if check.passed else "FAILED")
        for check in checks
    ]
    screen.table(rows, header=("check", "largest difference", "limit", ""))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
