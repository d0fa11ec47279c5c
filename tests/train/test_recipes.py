"""The shipped recipes: they parse, each stage starts from the one before, those of the paper have its values."""

from pathlib import Path

import pytest
import yaml

from arcaligner import ArcAlignerConfig
from arcaligner.train import sft
from arcaligner.train.corpora import parse_source

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "train/recipes").glob("*/[1-3]_*.yaml"))
STAGES = ["reconstruction", "grounding", "gating"]
PAPERS = ["mistral_7b", "llama_3_1_8b"]
NUM_GPUS = 4  # in both of the paper's tables


def parse(path, *arguments):
    """A recipe as on a machine without an accelerator, where bf16 is refused."""
    return sft.parse(["--config", str(path), "--use_cpu", "true", *arguments])


def recipe_id(path):
    return f"{path.parent.name}/{path.stem}"


def test_all_recipes_have_all_stages():
    expected = [
        f"{folder}/{n}_{stage}"
        for folder in sorted([*PAPERS, "smollm2_135m", "tiny"])
        for n, stage in zip((1, 2, 3), STAGES, strict=True)
    ]
    without_gates = [
        f"{folder}/{n}_{stage}"
        for folder in ("projector_only", "xrag")
        for n, stage in zip((1, 2), STAGES, strict=False)
    ]
    assert [recipe_id(path) for path in RECIPES] == sorted(expected + without_gates)


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_a_shipped_recipe_parses(path):
    parsed, args, text = parse(path)
    assert parsed.stage == path.stem.split("_")[1] == STAGES[int(path.stem[0]) - 1]
    assert Path(args.output_dir).parts == ("runs", path.parent.name, path.stem)
    assert yaml.safe_load(text) == yaml.safe_load(path.read_text("utf-8")) | {"use_cpu": True}
    assert all(parse_source(source) for source in parsed.train_files)


@pytest.mark.parametrize("folder", sorted({path.parent for path in RECIPES}), ids=lambda folder: folder.name)
def test_each_stage_starts_where_the_one_before_ended(folder):
    stages = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(folder.glob("[1-3]_*.yaml"))]
    assert [stage["stage"] for stage in stages] == STAGES[: len(stages)]
    assert [stage["model_name_or_path"] for stage in stages[1:]] == [stage["output_dir"] for stage in stages[:-1]]


# Tables "Hyperparameters for Stage I" and "Hyperparameters for Stage II & III".
OF_BOTH_TABLES = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
}
OF_STAGE = {
    1: {"learning_rate": 2e-4, "gradient_accumulation_steps": 8},
    2: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
    3: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
}
EXAMPLES = {1: (200_000, 256), 2: (90_447, 64), 3: (90_447, 64)}  # in all, and in a step
ALIGNER = {"lora_r": 128, "lora_alpha": 32, "lora_dropout": 0.05, "gate_layers": "all"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", PAPERS)
def test_the_recipes_of_the_paper_have_its_values(name, stage):
    (path,) = (ROOT / "train/recipes" / name).glob(f"{stage}_*.yaml")
    parsed, args, _ = parse(path)
    expected = OF_BOTH_TABLES | OF_STAGE[stage]
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.optim.startswith("adamw")
    examples_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * NUM_GPUS
    assert (parsed.max_train_samples, examples_a_step) == EXAMPLES[stage]
    assert {key: parsed.aligner[key] for key in ALIGNER} == ALIGNER
    assert 1 + parsed.aligner["max_refinement_steps"] == 3  # "max loops"
    assert args.bf16 and parsed.dtype == "bfloat16" and args.max_steps == -1
    ArcAlignerConfig(text_config={"model_type": "llama"}, **parsed.aligner)


@pytest.mark.parametrize(
    "name, backbone",
    [("mistral_7b", "mistralai/Mistral-7B-Instruct-v0.2"), ("llama_3_1_8b", "meta-llama/Llama-3.1-8B-Instruct")],
)
def test_the_recipes_of_the_paper_name_its_models_and_data(name, backbone):
    stages = [parse(path)[0] for path in sorted((ROOT / "train/recipes" / name).glob("*.yaml"))]
    first = stages[0]
    assert first.model_name_or_path == backbone
    assert first.processor["encoder_name_or_path"] == "Salesforce/SFR-Embedding-Mistral"
    assert first.processor["sentences_per_segment"] == 1
    sources = [parse_source(source)[0] for stage in stages for source in stage.train_files]
    assert sources == ["wikimedia/wikipedia", "hotpotqa/hotpot_qa", "hotpotqa/hotpot_qa"]


@pytest.mark.parametrize("path", [path for path in RECIPES if path.parent.name in PAPERS], ids=recipe_id)
def test_each_value_of_the_paper_says_where_it_stands(path):
    sourced = {*OF_BOTH_TABLES, *OF_STAGE[1], *ALIGNER, "optim", "max_refinement_steps", "max_train_samples"}
    table = "Table I:" if path.stem.startswith("1_") else "Table II & III:"
    for line in path.read_text("utf-8").splitlines():
        key, _, rest = line.strip().partition(":")
        if key in sourced:
            assert table in rest.partition("#")[2], line
            sourced.remove(key)
    assert not sourced


@pytest.mark.slow
@pytest.mark.default_backbone
def test_the_tiny_recipe_trains_all_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [tmp_path / stage for stage in STAGES]
    for number, path in enumerate(path for path in RECIPES if path.parent.name == "tiny"):
        start = ["--model_name_or_path", str(folders[number - 1])] if number else []
        cache = str(tmp_path / "cache")
        sft.main(
            *parse(
                path, "--output_dir", str(folders[number]), "--embedding_cache_dir", cache, "--max_steps", "1", *start
            )
        )
        assert ArcAlignerConfig.from_pretrained(folders[number]).training_stage == STAGES[number]
