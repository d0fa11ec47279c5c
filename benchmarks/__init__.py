"""Measurements of speed and memory, each with a description of the machine."""

from ..common.files import require_extra

require_extra("evaluation", "datasets", "matplotlib", "trl", "typer")
