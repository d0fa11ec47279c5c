"""Modules that have moved can be imported, and run as commands, by their old names for one version."""

import importlib
import runpy
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("benchmarks.kept", "benchmarks.cached_passages"),
        ("evaluation.analyses.refusals", "evaluation.analyses.abstentions"),
    ],
)
def test_old_command_runs(monkeypatch, capsys, old, new):
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    for name in (old, new):
        monkeypatch.delitem(sys.modules, f"arcaligner.{name}", raising=False)
    with pytest.warns(FutureWarning, match=f"`arcaligner.{old}` is now called `arcaligner.{new}`"):
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"arcaligner.{old}", run_name="__main__", alter_sys=True)
    assert end.value.code == 0 and "Usage" in capsys.readouterr().out
