"""`python -m arcaligner`, the same as the command `arcaligner`."""

import gc

from .common.files import exit_on_user_error, require_extra


def main() -> None:
    """Run the command line, or print how to install it."""
    try:
        with exit_on_user_error():
            require_extra("cli", "typer", "rich")
            from .apps.cli.app import main

            main()
    finally:
        gc.freeze()  # else Python's garbage collector takes seconds when the process ends


if __name__ == "__main__":
    main()
