"""BM25 by bm25s, which other modules import from here."""

import sys
from types import ModuleType

_NOT_THERE = object()


def import_bm25s() -> ModuleType:
    """The module `bm25s`, imported as if JAX were not installed.

    Where JAX can be imported, bm25s calls it already at its own import, and JAX then reserves three quarters of a GPU's
    memory, which a model in the same process needs. bm25s selects passages by NumPy as well.
    """
    hidden = {name: sys.modules.get(name, _NOT_THERE) for name in ("jax", "jax.lax")}
    sys.modules.update(dict.fromkeys(hidden))  # `None` makes an import fail
    try:
        import bm25s
    finally:
        for name, module in hidden.items():
            if module is _NOT_THERE:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return bm25s
