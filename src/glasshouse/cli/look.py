"""`glasshouse look`: open the page of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.cli import screen
from glasshouse.cli.model import MODEL_HELP, Device, Revision
from glasshouse.errors import InputError
from glasshouse.escaping import escape_control

app = typer.Typer()


@app.command(
    epilog="Example: glasshouse look runs/stdlib --text 'def main(' --port 8000, or "
    "glasshouse look python-3m --save live.html --live"
)
def look(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = pretrained.DEFAULT,
    text: Annotated[
        str, typer.Option(help="The prompt to start with.", show_default="a sample prompt of the run")
    ] = "",
    view: Annotated[
        str, typer.Option(help="The view to open, such as attention; for an unknown name the known ones are listed.")
    ] = "overview",
    save: Annotated[Path | None, typer.Option(help="Write the page to a standalone HTML file and exit.")] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="With --save: put the model into the file, so that it runs in the browser without a server.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen on; anything but loopback exposes the page.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 picks a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    memory: Annotated[float, typer.Option(help="Size of the activation cache in GiB.", min=0.01)] = 2.0,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Open a local page that shows a model at work: tokens, attention, residual stream, interventions, training.

    Without a model it opens on python-3m, a decoder of Python code that comes with glasshouse.
    """
    if live and save is None:
        raise InputError("--live puts the model into a file, but none is named; name one with --save.")
    open_page(model, {"text": text, "view": view}, save, live, host, port, browser, memory, revision, device)


def open_page(
    model: str,
    state: dict[str, object],
    save: Path | None,
    live: bool,
    host: str,
    port: int,
    browser: bool,
    memory: float,
    revision: str | None,
    device: str,
) -> None:
    """Serve the page of a model at a state, or write it to a file."""
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loader = gh.page.ModelLoader(model, revision=revision, device=where)
    loader.get("")  # report loading errors before the server starts
    traces = gh.page.TraceCache(loader, int(memory * 2**30))
    seen = gh.page.Look(traces, gh.page.validate_state(traces, state))
    if save is not None:
        with screen.waiting("drawing"):
            seen.save(save, live=live)
        print(f"{escape_control(str(save))}: {save.stat().st_size:,} bytes; open it in any browser")
        return
    server = gh.page.Server(traces, host, port)
    if not server.is_local:
        print(f"warning: everyone who can reach {host} and has the address can see the page and use the model")

    def started() -> None:
        print(f"Serving {escape_control(model)} until Ctrl-C; the address contains a secret token:")
        print(server.address + seen.fragment, flush=True)
        if browser:
            server.show(seen.fragment)

    server.run(started)
