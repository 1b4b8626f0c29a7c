"""`glasshouse look`: open the page of a model."""

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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model or run folder, or a Hugging Face hub id.")],
    text: Annotated[
        str, typer.Option(help="The text to show first.", show_default="one from the run's validation set")
    ] = "",
    view: Annotated[
        str, typer.Option(help="The view to open: text, attention, stream, experiment, steps, alignment, run.")
    ] = "text",
    save: Annotated[Path | None, typer.Option(help="Write the page to a standalone HTML file and exit.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to bind; other than 127.0.0.1 exposes the page to the network.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="The port; 0 picks a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    memory: Annotated[float, typer.Option(help="Cache of recorded activations, in GiB.", min=0.01)] = 2.0,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Open a page on this machine that shows a model at work: tokens, attention, stream, experiments, training."""
    subject = gh.page.Subject(model, revision=revision, device=find_device(device))
    subject.at("")  # what cannot be loaded is said before there is a page
    traces = gh.page.Traces(subject, int(memory * 2**30))
    seen = gh.page.Look(traces, gh.page.checked(traces, {"text": text, "view": view}))
    if save is not None:
        seen.save(save)
        print(f"{escape_control(str(save))}: {save.stat().st_size:,} bytes; open it in any browser")
        return
    server = gh.page.Server(traces, host, port)
    if not server.is_local:
        print(f"warning: anyone who can reach {host} and has the address can see the page and use the model")

    def started() -> None:
        print("Serving the page until Ctrl-C; its address is secret:")
        print(server.address + seen.fragment, flush=True)
        if browser:
            server.show(seen.fragment)

    server.run(started)
