"""The analyses as commands: each draws a figure and writes its data, with a caption.

python -m arcaligner.evaluation.analyses --help
"""

import logging

import typer

from ...files import exit_on_user_error
from .four_way import four_way
from .gates import gates
from .rates import rates
from .reconstruction import reconstruction
from .trajectories import trajectories

app = typer.Typer(
    help="Draws the paper's figures: a picture as PNG and SVG, its data as JSON, and a caption.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (gates, reconstruction, trajectories, four_way, rates):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a user's mistake ends in one clear line and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with exit_on_user_error():
        app(arguments)


if __name__ == "__main__":
    main()
