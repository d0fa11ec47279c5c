"""A benchmark's report: its tables for people, one JSON line for programs, and both as files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ..files import write_whole


def show_report(report: dict[str, Any], tables: Iterable[Table], output: Path | None, width: int = 120) -> None:
    """Prints `tables` and the line of `report`; with `output`, the line goes there and the tables to a .txt beside."""
    console = Console(record=True, width=width)
    for table in tables:
        console.print(table)
    line = json.dumps(report)
    typer.echo(line)
    if output is not None:
        write_whole(output, line + "\n")
        write_whole(output.with_suffix(".txt"), console.export_text())
