"""`glasshouse serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.cli.model import Device, Revision
from glasshouse.escaping import escape_control

app = typer.Typer()
T = TypeVar("T")

KEY_VARIABLE = "GLASSHOUSE_API_KEY"
MODELS_HELP = (
    "Models to serve: a model or run folder, a hub id, or a bundled model (python-3m, dates-1m), each also as "
    "NAME=MODEL, and with a LoRA adapter as NAME=MODEL+ADAPTER_FOLDER."
)


@app.command(epilog="Example: glasshouse serve runs/stdlib --port 8000")
def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODELS_HELP)],
    host: Annotated[
        str, typer.Option(help="The address to listen on; anything but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 picks a free one.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the accepted keys, one per line; or set {KEY_VARIABLE} to one key."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name that clients use for this server; can be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="The origin of a web page that may send requests (CORS); can be repeated."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Sequences that run at once, for each model.", min=1, show_default="up to 32, on CUDA 64"),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer.", min=1, show_default="the model's, at most 8192"),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Sequences in the queue, for each model and key; more are answered 429.", min=1)
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, waiting included.", min=1)] = 600.0,
    max_body: Annotated[float, typer.Option(help="MiB of a request.", min=0.01)] = 4.0,
    weights: Annotated[
        Literal["copy", "own", "int8", "int4"],
        typer.Option(help="The weights to run: a copy in a faster layout, the model's own, or quantized (CPU)."),
    ] = "copy",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile decode steps: a slower start, and slightly faster answers.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option(help="Make answers independent of other requests to the last bit; slower.")
    ] = False,
    look: Annotated[
        bool, typer.Option("--look", help="Add the page: a chat, and the last answers opened token by token.")
    ] = False,
    steer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A steering vector of `glasshouse steer make`, which requests scale by name; can be repeated.",
        ),
    ] = None,
    internals: Annotated[
        bool, typer.Option("--internals", help="Let requests record activations and score tokens by probes.")
    ] = False,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE", help="A linear probe of `glasshouse probe make`, by name; can be repeated."
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="What a probe's scores do in every answer, such as 'NAME > 2.5 x 3: stop' (for three tokens in a "
            "row), ': refuse' or ': steer VECTOR=1.0'; can be repeated."
        ),
    ] = None,
    log_level: Annotated[
        Literal["error", "warning", "info"], typer.Option(help="What is logged on stderr; info has every request.")
    ] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="The form of a line of the log.")] = "text",
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Serve models by OpenAI's API: completions, chat, embeddings; to this machine alone, unless there is a key."""
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    keys = _keys(api_key_file)
    loaded = gh.serve.load_models(models, device=where, revision=revision)
    models_alone = [model for _, model, _ in loaded]
    vectors = _named("--steer", "steering vector", steer or (), gh.inspection.SteeringVector.load)
    steering = gh.serve.assign("steering vector", vectors, models_alone)
    named_probes = _named("--probe", "probe", probe or (), gh.inspection.LinearProbe.load)
    probes = gh.serve.assign("probe", named_probes, models_alone)
    rules = gh.serve.assign_rules([gh.generation.Rule.parse(text) for text in rule or ()], probes)
    served = []
    for (name, model, tok), own_vectors, own_probes, own_rules in zip(loaded, steering, probes, rules, strict=True):
        one = gh.serve.ServedModel(
            name,
            model,
            tok,
            slots=slots,
            max_len=max_len,
            weights=weights,
            compile=compile_,
            batch_invariant=batch_invariant,
            steering=own_vectors,
            probes=own_probes,
            rules=own_rules,
        )
        served.append(one)
    server = gh.serve.Server(
        served,
        host=host,
        port=port,
        keys=keys,
        allowed_hosts=allow_host or (),
        allowed_origins=allow_origin or (),
        limits=gh.serve.Limits(max_waiting=max_waiting, timeout=timeout, max_body=int(max_body * 2**20)),
        look=look,
        internals=internals,
        log=gh.serve.Log(log_level, log_format),
    )

    def started() -> None:
        names = ", ".join(escape_control(one.name) for one in served)
        guarded = f"{len(keys)} {'key' if len(keys) == 1 else 'keys'}" if keys else "no key: this machine only"
        if look:
            print(f"The page: {server.address}/")
        print(f"Serving {names} until Ctrl-C ({guarded}); the base URL of OpenAI clients:")
        print(f"{server.address}/v1", flush=True)

    server.run(started)


def _named(option: str, kind: str, arguments: Sequence[str], load: Callable[[str], T]) -> dict[str, T]:
    """Return what the files of NAME=FILE arguments have."""
    found = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not (name and separator and path):
            raise gh.InputError(f"{option} is {argument!r}, but it must be NAME=FILE.")
        if name in found:
            raise gh.InputError(f"two {kind}s are named {name!r}; rename one.")
        found[name] = load(path)
    return found


def _keys(file: Path | None) -> list[str]:
    """Return the accepted keys: not from the command line, which every user of the machine can read."""
    keys = [key] if (key := os.environ.pop(KEY_VARIABLE, "").strip()) else []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise gh.InputError(f"the keys in {str(file)!r} cannot be read: {error}.") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise gh.InputError(f"{str(file)!r} has no keys; write one per line.")
        keys += found
    return keys
