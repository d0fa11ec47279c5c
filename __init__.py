"""ArcAligner: retrieved passages as context slots for a frozen language model.

    from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor

These names are imported on first use, so that `import arcaligner` takes no time.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec, spec_from_loader
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


class _MovedModules(MetaPathFinder, Loader):
    """Imports and runs modules by the names that they had before, such as `arcaligner.corpus` for
    `arcaligner.apps.corpus`, for one version."""

    def __init__(self):
        self.specs = {}  # of the modules by their old names
        self.new_names = {name: f"apps.{name}" for name in ("cli", "corpus", "engines", "server")}
        self.new_names["benchmarks.kept"] = "benchmarks.cached_passages"
        self.new_names["evaluation.analyses.refusals"] = "evaluation.analyses.abstentions"

    def new_name(self, name):
        """The new name of a module, or `None` if it has not moved."""
        package, _, inner = name.partition(".")
        for old, new in self.new_names.items() if package == __name__ else ():
            if f"{inner}.".startswith(f"{old}."):
                return f"{package}.{new}{inner.removeprefix(old)}"
        return None

    def find_spec(self, name, path=None, target=None):
        new = self.new_name(name) and find_spec(self.new_name(name))
        return spec_from_loader(name, self, origin=new.origin) if new else None  # `python -m` needs the origin

    def warn(self, name):
        message = f"`{name}` is now called `{self.new_name(name)}`; the old name will be removed in the next release."
        warnings.warn(message, FutureWarning, stacklevel=3)

    def get_code(self, name):
        """The code that `python -m` runs."""
        self.warn(name)
        return find_spec(self.new_name(name)).loader.get_code(self.new_name(name))

    def create_module(self, spec):
        self.warn(spec.name)
        module = import_module(self.new_name(spec.name))
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__spec__.name]  # the import system has replaced it


sys.meta_path.insert(0, _MovedModules())  # first, because the finder of files would load a second module
