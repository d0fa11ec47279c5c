"""The model card tells what the files beside it do: data, rates, numbers with intervals, limits, license."""

import json
from pathlib import Path

import pytest
import yaml

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.share.hub import is_hub_id, write_model_card

# As `evaluation/results.py` writes them: F1 and EM, and more that is not for the card.
RESULTS = {
    "questions": 500,
    "machine": "2 CPU cores",
    "sets": {
        "SQuAD": {
            "compression_rate": 33.57,
            "slots_per_question": 4.8,
            "refinement_steps": 0.1,
            "methods": {
                "closed book": {"em": [3.0, 1.0, 5.5], "f1": [4.1, 3.1, 5.3], "seconds": 33.0},
                "ArcAligner": {"em": [5.0, 2.0, 8.5], "f1": [9.7, 6.5, 13.2], "seconds": 35.0},
            },
        },
        "NQ": {
            "compression_rate": 30.04,
            "methods": {"ArcAligner": {"f1": [8.0, 6.0, 10.0], "em_raw": [1.0, 0.0, 2.0], "seconds": 9.0}},
        },
    },
}
RECIPES = """stage: reconstruction
train_files:
  ../data/recon_train.jsonl.gz: 0.5
  wikimedia/wikipedia?name=20231101.en&title=title: 0.5
max_train_samples: 2400
---
stage: grounding
train_files:
  hotpotqa/hotpot_qa: 0.5
  ../data/train_qa.parquet?text=body: 0.5
"""
RESULT_TABLES = """\
500 questions of each set, in percent with 95 % bootstrap intervals.

Measured compression rate (tokens of text per slot): SQuAD x33.6, NQ x30.0.

| EM (non-strict) | SQuAD | NQ |
| --- | --- | --- |
| closed book | 3.0 [1.0, 5.5] | - |
| ArcAligner | 5.0 [2.0, 8.5] | - |

| F1 | SQuAD | NQ |
| --- | --- | --- |
| closed book | 4.1 [3.1, 5.3] | - |
| ArcAligner | 9.7 [6.5, 13.2] | 8.0 [6.0, 10.0] |

| EM (raw) | SQuAD | NQ |
| --- | --- | --- |
| ArcAligner | - | 1.0 [0.0, 2.0] |
"""
TRAINING = """\
| stage | data | most examples |
| --- | --- | --- |
| reconstruction | recon_train.jsonl.gz, wikimedia/wikipedia | 2,400 |
| grounding | hotpotqa/hotpot_qa, train_qa.parquet | all |
"""
SETTINGS = """\
| base model | someone/base |
| sentence encoder | someone/encoder, 12 wide |
| LoRA on slots | r 4, alpha 32 |
| gates | 2 layers, at most 2 extra passes |
"""


@pytest.fixture
def config() -> ArcAlignerConfig:
    return ArcAlignerConfig(
        text_config={"model_type": "llama", "num_hidden_layers": 3},
        base_model_name_or_path="someone/base",
        encoder_name_or_path="someone/encoder",
        encoder_hidden_size=12,
        lora_r=4,
        gate_layers=[0, 2],
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a run leaves: recipes, results, a processor that splits English sentences."""
    (tmp_path / "recipe.yaml").write_text(RECIPES)
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "processor_config.json").write_text('{"spacy_model": "en_core_web_sm"}')
    return tmp_path


def read(folder: Path) -> tuple[dict, str]:
    """Metadata and text of the card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_card_shows_settings_results_data_limits_and_license(config, folder):
    write_model_card(config, folder)
    _, text = read(folder)
    for part in (SETTINGS, RESULT_TABLES, TRAINING):
        assert part in text
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == ["# ArcAligner", "## Results", "## Training", "## Limits", "## License"]
    limits, license = text.split("## Limits\n")[1].split("## License\n")
    assert "A slot is lossy" in limits and "Check answers against the passages" in limits
    assert "aligner weights: Apache-2.0" in license and "training data keep their own" in " ".join(license.split())


def test_metadata_are_what_the_hub_lists_a_model_by(config, folder):
    write_model_card(config, folder)
    metadata, _ = read(folder)
    (listed,) = metadata.pop("model-index")
    assert metadata == {
        "license": "apache-2.0",
        "language": "en",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["arcaligner", "rag", "context-compression"],
        "base_model": "someone/base",
        "base_model_relation": "adapter",
        "datasets": ["hotpotqa/hotpot_qa", "wikimedia/wikipedia"],
    }
    found = {(each["dataset"]["name"], m["type"]): m["value"] for each in listed["results"] for m in each["metrics"]}
    assert found == {("SQuAD", "em"): 5.0, ("SQuAD", "f1"): 9.7, ("NQ", "f1"): 8.0, ("NQ", "em_raw"): 1.0}


def test_card_without_results_and_recipe_says_nothing_of_them(config, tmp_path):
    config.base_model_name_or_path = str(tmp_path)
    write_model_card(config, tmp_path)
    metadata, text = read(tmp_path)
    assert "## Results" not in text and "## Training" not in text and "## Limits" in text
    assert not {"datasets", "model-index", "base_model", "base_model_relation", "language"} & metadata.keys()
    assert f"| base model | {tmp_path} |" in text


def test_card_is_written_again_when_results_come_and_keeps_named_data_sets(config, folder):
    (folder / "results.json").unlink()
    write_model_card(config, folder, datasets=("someone/data",))
    assert "## Results" not in read(folder)[1]
    (folder / "results.json").write_text(json.dumps(RESULTS))
    write_model_card(config, folder)
    metadata, text = read(folder)
    assert RESULT_TABLES in text
    assert metadata["datasets"] == ["hotpotqa/hotpot_qa", "someone/data", "wikimedia/wikipedia"]


def test_sets_of_different_sizes_say_how_many_questions_each_has(config, folder):
    results = json.loads(json.dumps(RESULTS))
    results["questions"] = results["sets"]["SQuAD"]["questions"] = 320
    results["sets"]["NQ"]["questions"] = 1500
    (folder / "results.json").write_text(json.dumps(results))
    write_model_card(config, folder)
    text = read(folder)[1]
    assert "\nSQuAD 320, NQ 1,500 questions, in percent with 95 % bootstrap intervals.\n" in text
    assert "of each set" not in text
    results["sets"]["NQ"]["questions"] = 320
    (folder / "results.json").write_text(json.dumps(results))
    write_model_card(config, folder)
    assert "\n320 questions of each set, in percent" in read(folder)[1]


def test_edited_card_is_left_alone_until_it_is_deleted(config, folder):
    assert write_model_card(config, folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert not write_model_card(config, folder)
    assert (folder / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"
    (folder / "README.md").unlink()
    assert write_model_card(config, folder)
    assert read(folder)[1].startswith("<!-- Written from the files beside it")


def test_quick_start_loads_what_the_card_is_written_for(config, folder):
    for name, loaded in (("someone/aligner", "someone/aligner"), (None, folder.as_posix())):
        write_model_card(config, folder, name=name)
        assert f'pipeline("text-generation", model="{loaded}", trust_remote_code=True)' in read(folder)[1]


@pytest.mark.parametrize(
    "results",
    [
        "{",
        "[]",
        '{"sets": {}}',
        '{"questions": 5, "sets": {"NQ": []}}',
        '{"questions": 5, "sets": {"NQ": {"methods": {"ArcAligner": {"f1": 3.0}}}}}',
        '{"questions": 5, "sets": {"NQ": {"methods": {"ArcAligner": {"f1": [3.0, 2.0]}}}}}',
    ],
)
def test_malformed_results_are_refused_and_no_card_is_written(config, folder, results):
    (folder / "results.json").write_text(results)
    with pytest.raises(ValueError, match="results.json does not hold results of an evaluation. Expected .*Write them"):
        write_model_card(config, folder)
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    "second, message",
    [
        ("stage: [", "(?s)recipe.yaml is not YAML.*Put the recipe"),
        ("train_files: {a.jsonl: 1.0}\n", "recipe.yaml: recipe 2 of 2 has no `stage`.*Add it"),
        ("- a list\n", "recipe.yaml: recipe 2 of 2 has no `stage`.*Add it"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused_and_no_card_is_written(config, folder, second, message):
    (folder / "recipe.yaml").write_text(f"stage: reconstruction\n---\n{second}")
    with pytest.raises(ValueError, match=message):
        write_model_card(config, folder)
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("someone/data", True),
        ("some.one/da-ta_1", True),
        (None, False),
        ("data", False),
        ("../data", False),
        ("./data", False),
        ("/data/base", False),
        ("data/train.jsonl.gz", False),
        ("data/train.parquet", False),
        ("a/b/c", False),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(name, expected):
    assert is_hub_id(name) is expected


def test_a_folder_that_is_there_is_no_name_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "someone" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("someone/data")
