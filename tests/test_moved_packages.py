"""Packages that have moved can be imported by their old names for one version."""

import importlib
import sys

import pytest

pytest.importorskip("lancedb")


def test_old_name_is_same_module(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("arcaligner.corpus")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match=r"`arcaligner\.corpus\.sources` is now called `arcaligner\.apps\.corpus"):
        old = importlib.import_module("arcaligner.corpus.sources")
    assert old is importlib.import_module("arcaligner.apps.corpus.sources")
    assert old.__spec__.name == old.__name__ == "arcaligner.apps.corpus.sources"
    with pytest.raises(ModuleNotFoundError, match="arcaligner.corpora"):
        importlib.import_module("arcaligner.corpora")
