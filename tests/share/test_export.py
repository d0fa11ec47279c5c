"""The exported aligner has bfloat16 weights, all recipes and a model card; exporting again loses nothing of the card,
and keeps results for as long as they are of these weights."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
import yaml
from conftest import edit_json
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.share import export
from arcaligner.share.hub import check_checkpoint

RECIPES = {
    "1_reconstruction": "# I\nstage: reconstruction\ntrain_files: {someone/texts: 1.0}",  # no newline at the end
    "2_grounding": "# II\nstage: grounding\ntrain_files: {someone/questions: 1.0}\n\n",
    "3_gating": "# III\nstage: gating\ntrain_files: {../data/questions.jsonl: 1.0}\n",
}
RESULTS = {"questions": 5, "sets": {"NQ": {"methods": {"arcaligner": {"f1": [9.7, 6.5, 13.2]}}}}}


@pytest.fixture
def stages(checkpoint_dir, tmp_path) -> Path:
    """Three finished stages and one that broke off; stage n has weights that are n larger."""
    for number, (name, recipe) in enumerate(RECIPES.items(), start=1):
        folder = shutil.copytree(checkpoint_dir, tmp_path / "runs" / name)
        (folder / "recipe.yaml").write_text(recipe)
        add_to_weights(folder, number)
    (tmp_path / "runs" / "4_broken").mkdir()
    return tmp_path / "runs"


def add_to_weights(folder: Path, added: float) -> None:
    weights = {name: tensor + added for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", digests=None)


def export_to(output: Path, stages: Path) -> Result:
    app = typer.Typer()
    app.command()(export.main)
    return CliRunner().invoke(app, ["--stages", str(stages), "--output", str(output)], catch_exceptions=False)


@pytest.fixture
def exported(stages, tmp_path) -> Path:
    """The folder of an export of `stages`."""
    assert export_to(tmp_path / "exported", stages).exit_code == 0
    return tmp_path / "exported"


@pytest.fixture
def measured(exported) -> Path:
    """An export with results."""
    (exported / "results.json").write_text(json.dumps(RESULTS))
    return exported


def test_export_of_the_last_stage(stages, exported):
    """The last stage is written in bfloat16, with processor, card and the recipes of all stages."""
    weights, trained = load_file(exported / "model.safetensors"), load_file(stages / "3_gating" / "model.safetensors")
    assert weights.keys() == trained.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[name].to(torch.bfloat16)), name
    assert {p.dtype for _, p in ArcAlignerForCausalLM.from_pretrained(exported).aligner_parameters()} == {torch.float32}
    assert check_checkpoint(exported).model_type == "arcaligner"  # so a push accepts it
    text, card = (exported / "recipe.yaml").read_text(), (exported / "README.md").read_text()
    assert list(yaml.safe_load_all(text)) == [yaml.safe_load(recipe) for recipe in RECIPES.values()]
    assert text == "---\n".join(f"{recipe.strip()}\n" for recipe in RECIPES.values())
    assert "- someone/questions\n- someone/texts\n" in card
    assert "model=checkpoint, trust_remote_code=True)" in card


def test_export_keeps_edited_card(stages, exported):
    (exported / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    output = export_to(exported, stages).output
    assert "README.md" in output and "delete it" in output
    assert (exported / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"


def copy_more(stage):
    processor = ArcAlignerProcessor.from_pretrained(stage)
    processor.copy_bonus = 3.0
    processor.save_pretrained(stage)


@pytest.mark.parametrize(
    "change", [lambda stage: add_to_weights(stage, 1.0), copy_more], ids=["weights", "a setting of the processor"]
)
def test_results_follow_the_weights(stages, measured, change):
    """Results enter the card, and are removed when the weights change."""
    assert "Removed" not in export_to(measured, stages).output
    assert json.loads((measured / "results.json").read_text()) == RESULTS
    assert "| **slots** | segment | 9.7 |" in (measured / "README.md").read_text()
    change(stages / "3_gating")
    assert "Removed" in export_to(measured, stages).output
    assert not (measured / "results.json").exists() and "9.7" not in (measured / "README.md").read_text()


def test_old_results_go_first(stages, measured, monkeypatch):
    """Results of other weights are removed before the new weights are written."""
    add_to_weights(stages / "3_gating", 1.0)
    monkeypatch.setattr(export, "write_model_card", Mock(side_effect=KeyboardInterrupt))  # before the new card
    assert export_to(measured, stages).exit_code != 0 and not (measured / "results.json").exists()


def test_unfinished_stages_are_refused(stages, tmp_path):
    result = export_to(tmp_path / "exported", stages / "4_broken")
    assert result.exit_code == 2 and "contains no finished stage" in " ".join(result.output.replace("│", "").split())
    assert not (tmp_path / "exported").exists()
