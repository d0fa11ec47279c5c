"""Reports on a trained aligner and timings, each with the machine it ran on."""

from ..common.files import require_extra

require_extra("evaluation", "datasets", "matplotlib", "trl", "typer")
