"""The analyses as commands.

python -m arcaligner.evaluation.analyses --help
"""

import logging

import typer

from ...common.files import exit_on_user_error
from .gates import gates
from .rates import rates
from .refusals import refusals

app = typer.Typer(
    help="The paper's analyses. A figure is written as SVG and JSON, with its caption.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (gates, rates, refusals):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a user's mistake ends in one clear line and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with exit_on_user_error():
        app(arguments)


if __name__ == "__main__":
    main()
