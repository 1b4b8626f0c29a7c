"""`glasshouse notes`: the statements of the lecture notes, drawn on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.cli.look import open_page
from glasshouse.cli.model import MODEL_HELP, Device, Revision

app = typer.Typer()


@app.command(epilog="Example: glasshouse notes --card A1,A3,M4 --save lecture.html")
def notes(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = pretrained.ENGLISH,
    card: Annotated[
        str,
        typer.Option(
            help="The card to open, such as A3, or several, such as A1,A3,M4.",
            show_default="the first",
        ),
    ] = "",
    text: Annotated[
        str, typer.Option(help="The text that the figures are drawn on.", show_default="a sample prompt of the run")
    ] = "",
    save: Annotated[
        Path | None, typer.Option(help="Write all cards, or those of --card, to a standalone HTML file and exit.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; anything but loopback exposes the page.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 picks a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    memory: Annotated[float, typer.Option(help="Size of the activation cache in GiB.", min=0.01)] = 2.0,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Open the lecture notes about transformers as cards, each with a figure computed on a model.

    With --save, all of them or those of --card are one page that opens without a server or network, to hand out or to
    print.
    """
    state: dict[str, object] = {"text": text, "view": "notes"}
    cards = [gh.notes.statement(one.strip().upper()).number for one in card.split(",")] if card else []
    if save is not None and not cards:
        state["notes_all"] = 1
    elif save is not None or len(cards) > 1:
        state["notes_cards"] = ",".join(dict.fromkeys(cards))
    elif cards:
        state["notes_card"] = cards[0]
    open_page(model, state, save, False, host, port, browser, memory, revision, device)
