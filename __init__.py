"""ArcAligner: retrieved passages as context slots for a frozen language model.

    from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor

The names below are imported when they are first used, so that `import arcaligner` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration_arcaligner import ArcAlignerConfig
    from .modeling_arcaligner import ArcAlignerForCausalLM
    from .pipeline_arcaligner import ArcAlignerPipeline
    from .processing_arcaligner import ArcAlignerProcessor

__version__ = "0.2.0"
__all__ = ["ArcAlignerConfig", "ArcAlignerForCausalLM", "ArcAlignerPipeline", "ArcAlignerProcessor"]

_HOME = {
    "ArcAlignerConfig": "configuration_arcaligner",
    "ArcAlignerForCausalLM": "modeling_arcaligner",
    "ArcAlignerPipeline": "pipeline_arcaligner",
    "ArcAlignerProcessor": "processing_arcaligner",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
