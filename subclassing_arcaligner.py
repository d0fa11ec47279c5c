"""Gives a module more behaviour in place: its class becomes a subclass of itself, under the same name.

Wrapping a module in another would change its state-dict keys and hide its class from checkpointing, sharding and output
recording, which look classes up by name. A subclass with the same name leaves all of that as it is.
"""

import functools

from torch import nn


@functools.cache
def _subclass(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _empty_module(mixin: type, cls: type[nn.Module]) -> nn.Module:
    """What `pickle` and `copy` fill with a module's state: pickle cannot find two classes under one name."""
    subclass = _subclass(mixin, cls)
    return subclass.__new__(subclass)


class InPlaceMixin:
    """Base of the mixins for `mix_in`; they come before the module's own class."""

    def __reduce_ex__(self, protocol):
        return _empty_module, type(self).__bases__, self.__getstate__()


def mix_in(mixin: type[InPlaceMixin], module: nn.Module) -> None:
    """Puts `mixin` before the class of `module`, in place."""
    module.__class__ = _subclass(mixin, type(module))
