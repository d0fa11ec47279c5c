"""`python -m arcaligner`, the same as the command `arcaligner`."""

from .files import exit_on_user_error, require_extra


def main() -> None:
    """Runs the command line, or says how to install it."""
    with exit_on_user_error():
        require_extra("cli", "typer", "rich")
        from .cli import main

        main()


if __name__ == "__main__":
    main()
