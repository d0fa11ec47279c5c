"""ArcAligner: retrieved passages as context slots for a frozen language model.

    from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor

These names are imported on first use, so that `import arcaligner` takes no time.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
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


class _MovedPackages(MetaPathFinder, Loader):
    """Imports packages by the names that they had before, such as `arcaligner.corpus` for `arcaligner.apps.corpus`, for
    one version."""

    def __init__(self):
        self.specs = {}  # of the modules by their old names

    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        is_moved = parts[0] == __name__ and len(parts) > 1 and parts[1] in ("cli", "corpus", "engines", "server")
        return spec_from_loader(name, self) if is_moved else None

    def create_module(self, spec):
        new_name = spec.name.replace(__name__, f"{__name__}.apps", 1)
        message = f"`{spec.name}` is now called `{new_name}`; the old name will be removed in the next release."
        warnings.warn(message, FutureWarning, stacklevel=2)
        module = import_module(new_name)
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__spec__.name]  # the import system has replaced it


sys.meta_path.insert(0, _MovedPackages())  # first, because the finder of files would load a second module
