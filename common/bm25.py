"""BM25 by the library bm25s, imported here for all other modules."""

import sys
from types import ModuleType

_ABSENT = object()


def import_bm25s() -> ModuleType:
    """The module `bm25s`, imported as if JAX were not installed.

    If JAX is installed, importing bm25s initializes it, and JAX then reserves three quarters of the GPU's memory, which
    a model in the same process needs. bm25s works with NumPy instead.
    """
    hidden = {name: sys.modules.get(name, _ABSENT) for name in ("jax", "jax.lax")}
    sys.modules.update(dict.fromkeys(hidden))  # `None` makes an import fail
    try:
        import bm25s
    finally:
        for name, module in hidden.items():
            if module is _ABSENT:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return bm25s
