"""The command that opens a page on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli.model import Device, Revision, find_device
from glasshouse.escaping import escape_control

app = typer.Typer()


@app.command(epilog="Example: glasshouse look runs/stdlib --text 'def main(' --port 8000")
def look(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The folder of a model or of a run, or an id on the hub.")
    ],
    text: Annotated[
        str, typer.Option(help="The text to look at first.", show_default="one that the run was tried on")
    ] = "",
    view: Annotated[
        str,
        typer.Option(
            help="The view to open: tokens, attention, residual, interventions, walkthrough, alignment, run."
        ),
    ] = "tokens",
    save: Annotated[
        Path | None, typer.Option(help="Write the page to this file, which needs no server, and stop.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to serve at; others than this machine's are a risk.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes one that is free.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    memory: Annotated[float, typer.Option(help="GiB that may be kept of what was seen in texts.", min=0.01)] = 2.0,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Open a page on this machine that shows a model at work: tokens, attention, stream, experiments, training."""
    loader = gh.page.ModelLoader(model, revision=revision, device=find_device(device))
    loader.get("")  # what cannot be loaded is said before there is a page
    traces = gh.page.TraceCache(loader, int(memory * 2**30))
    seen = gh.page.Look(traces, gh.page.validate_state(traces, {"text": text, "view": view}))
    if save is not None:
        seen.save(save)
        print(f"{escape_control(str(save))}: {save.stat().st_size:,} bytes; open it in any browser")
        return
    server = gh.page.Server(traces, host, port)
    if not server.is_local:
        print(f"warning: whoever reaches {host} and has the address can see the page and use the model")

    def started() -> None:
        print("The page is open until you press Ctrl-C; its address is for you alone:")
        print(server.address + seen.fragment, flush=True)
        if browser:
            server.show(seen.fragment)

    server.run(started)
