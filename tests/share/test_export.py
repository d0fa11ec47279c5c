"""The exported aligner has bfloat16 weights, all recipes and a model card; exporting again loses nothing of the card,
and keeps results for as long as they are of these weights."""

import json
import shutil
from pathlib import Path

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


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "exported"


def add_to_weights(folder: Path, added: float) -> None:
    weights = {name: tensor + added for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", digests=None)


def run(stages: Path, output: Path) -> Result:
    app = typer.Typer()
    app.command()(export.main)
    return CliRunner().invoke(app, ["--stages", str(stages), "--output", str(output)], catch_exceptions=False)


def write(stages: Path, output: Path) -> str:
    """Exports; what was said."""
    result = run(stages, output)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_last_stage_is_written_in_bfloat16_with_processor_card_and_the_recipes_of_all(stages, output):
    write(stages, output)
    weights, trained = load_file(output / "model.safetensors"), load_file(stages / "3_gating" / "model.safetensors")
    assert weights.keys() == trained.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[name].to(torch.bfloat16)), name
    assert {p.dtype for _, p in ArcAlignerForCausalLM.from_pretrained(output).aligner_parameters()} == {torch.float32}
    assert check_checkpoint(output).model_type == "arcaligner"  # which a push takes
    text, card = (output / "recipe.yaml").read_text(), (output / "README.md").read_text()
    assert list(yaml.safe_load_all(text)) == [yaml.safe_load(recipe) for recipe in RECIPES.values()]
    assert text == "---\n".join(f"{recipe.strip()}\n" for recipe in RECIPES.values())
    assert "- someone/questions\n- someone/texts\n" in card
    assert 'model="user/name", trust_remote_code=True)' in card


def test_another_export_keeps_an_edited_card(stages, output):
    write(stages, output)
    (output / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert "left" in (said := write(stages, output)) and "Delete it" in said
    assert (output / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"


def copy_more(stage):
    processor = ArcAlignerProcessor.from_pretrained(stage)
    processor.copy_bonus = 3.0
    processor.save_pretrained(stage)


@pytest.mark.parametrize(
    "change", [lambda stage: add_to_weights(stage, 1.0), copy_more], ids=["weights", "a setting of the processor"]
)
def test_results_come_into_the_card_and_go_with_what_they_were_measured_with(stages, output, change):
    write(stages, output)
    (output / "results.json").write_text(json.dumps(RESULTS))
    assert "removed" not in write(stages, output)
    assert json.loads((output / "results.json").read_text()) == RESULTS
    assert "| **slots** | segment | 9.7 |" in (output / "README.md").read_text()
    change(stages / "3_gating")
    assert "removed" in write(stages, output)
    assert not (output / "results.json").exists() and "9.7" not in (output / "README.md").read_text()


def test_results_are_gone_before_other_weights_are_there(stages, output, monkeypatch):
    write(stages, output)
    (output / "results.json").write_text(json.dumps(RESULTS))
    add_to_weights(stages / "3_gating", 1.0)

    def break_off(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "save_stage", break_off)
    assert run(stages, output).exit_code != 0 and not (output / "results.json").exists()


def test_a_folder_without_a_finished_stage_is_refused(stages, output):
    result = run(stages / "4_broken", output)
    assert result.exit_code == 2 and "holds no finished stage" in " ".join(result.output.replace("│", "").split())
    assert not output.exists()
