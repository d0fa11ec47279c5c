"""Options that several analyses have, each with the same words."""

from pathlib import Path
from typing import Annotated

import typer

FIGURES = Path("runs/figures")

Folder = Annotated[Path, typer.Option("--output", help="Folder for the figure and its data.")]
Data = Annotated[Path | None, typer.Option(help="Folder of local files, TASK.jsonl.gz; else from the Hub.")]
BatchSize = Annotated[int, typer.Option(help="Questions or paragraphs at a time.", min=1)]
Device = Annotated[str, typer.Option(help="Where models run: cpu, cuda.")]
