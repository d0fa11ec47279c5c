"""`python -m arcaligner`, the same as the command `arcaligner`."""

from .cli import main

main()
