"""`glasshouse doctor`: what was found on this machine, what will be used, what is missing and how to get it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import glasshouse as gh
from glasshouse.cli import environment, screen

app = typer.Typer()


@app.command(epilog="Example: glasshouse doctor --json")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Show what was found on this machine, what will be used, and what is missing; exit 1 if something is broken.

    It writes nothing and needs no network.
    """
    problems = list(environment.unmet_requirements())
    found, used = environment.software(), dict[str, Any]()
    with screen.waiting("loading torch"):
        try:
            found, used = {**found, **environment.hardware()}, environment.choices()
        except (ImportError, OSError) as error:
            reason = environment.one_line(error)
            problems.append(f"torch, or a library beside it, cannot be imported ({reason}); install it again.")
        else:
            problems += environment.device_problem(gh.device.fastest())
    report = {"found": found, "used": used, "optional": environment.optional(found), "problems": problems}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if problems:
        raise typer.Exit(1)


def _print(report: dict[str, Any]) -> None:
    _section("found", _found_rows(report["found"]))
    _section("will be used", _used_rows(report["used"]) if report["used"] else [])
    optional = report["optional"].items()
    _section("optional", [(name, one["for"], one["found"] or f"missing: {one['get']}") for name, one in optional])
    print("problems:" if report["problems"] else "all that is needed is there")
    for problem in report["problems"]:
        print(f"  {problem}")


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    if rows:
        print(f"{title}:")
        screen.table([(f"  {row[0]}", *row[1:]) for row in rows])
        print()


def _found_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, f"{found[name]['version']}, {found[name]['path']}") for name in ("glasshouse", "python")]
    rows.append(("platform", found["platform"]))
    if "torch" not in found:
        return rows
    cpu = found["cpu"]
    bfloat16 = {True: "native bfloat16", False: "no native bfloat16", None: ""}[cpu["native_bfloat16"]]
    rows += [
        ("torch", f"{found['torch']['version']}, built for {found['torch']['build']}"),
        ("CPU", _join(cpu["name"], _count(cpu["cores"], "core"), _count(cpu["threads"], "torch thread"), bfloat16)),
        ("memory", _gib(found["memory_bytes"])),
        *((gpu["device"] or "GPU", _gpu(gpu)) for gpu in found["gpus"]),
    ]
    return rows


def _gpu(gpu: dict[str, Any]) -> str:
    return _join(
        gpu["name"],
        "not usable by torch" if gpu["device"] is None else _gib(gpu["memory_bytes"]),
        f"compute capability {gpu['compute_capability']}" if "compute_capability" in gpu else "",
        f"driver {gpu['driver']}" if gpu.get("driver") else "",
    )


def _used_rows(used: dict[str, Any]) -> list[tuple[str, str]]:
    attention, hub = used["attention"], used["hub"]
    backends = [f"{backend} for {call}" for call, backend in attention.items()]
    offline = "offline (HF_HUB_OFFLINE is set)" if hub["offline"] else "online"
    return [
        ("device", used["device"]),
        ("precision", used["precision"]),
        ("attention", attention["training"] if len(set(attention.values())) == 1 else ", ".join(backends)),
        ("compile", "yes" if used["compile"]["used"] else f"no: {used['compile']['reason']}"),
        ("tokenizer", used["tokenizer"]),
        ("hub cache", _join(hub["cache"], offline, "with a token" if hub["token"] else "no token")),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
