"""The model card tells what the files beside it do: data, rates, F1, limits, license."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from arcaligner.common.data_sets import HOTPOTQA, LICENCES, MUSIQUE, QAMR, QED, SQUAD, TRAINING_FILES, WIKIPEDIA
from arcaligner.common.files import ROOT
from arcaligner.configuration_arcaligner import REQUIREMENTS, ArcAlignerConfig
from arcaligner.share.hub import is_hub_id, model_card, write_model_card

# As `evaluation/results.py` writes them: F1, and more that is not for the card.
RESULTS = {
    "questions": 500,
    "sets": {
        "SQuAD": {
            "passages": "gold",
            "recall": [99.6, 99.0, 100.0],
            "methods": {
                "naive": {"em": [3.0, 1.0, 5.5], "f1": [4.1]},
                "standard_rag": {"f1": [11.0]},
                "arcaligner_xsegment": {"f1": [6.0]},
                "arcaligner": {"em": [5.0, 2.0, 8.5], "f1": [9.6512, 6.5, 13.2]},
                "full_text_lora": {"f1": [30.0]},
            },
        },
        "NQ": {"methods": {"arcaligner": {"f1": [8.0]}}},
        "PopQA": {"methods": {"naive": {"f1": [8.0]}}},
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
  ../data/train_qa.parquet?text=body: 0.3
  someone/questions: 0.2
"""
RESULT_TABLE = """\
| F1 of what is read | tokens of text per position | SQuAD | NQ |
| --- | --- | --- | --- |
| the whole text, by the base model fine-tuned to read it | 1 | 30.0 | - |
| **slots** | 2 | 9.7 | 8.0 |
| **slots** | segment | 6.0 | - |
| no passages, by the base model | - | 4.1 | - |
| passages that are read |  | gold | given |
| with an expected answer in them |  | 100 % | - |
"""
TRAINING = """\
| data | place | licence | stages |
| --- | --- | --- | --- |
| paragraphs of Wikipedia | wikimedia/wikipedia | CC BY-SA 3.0 and GFDL | reconstruction |
| HotpotQA | hotpotqa/hotpot_qa | CC BY-SA 4.0 | grounding |
| train_qa.parquet | train_qa.parquet | not known | grounding |
| someone/questions | someone/questions | see there | grounding |

Stages: reconstruction, grounding. All settings are in `recipe.yaml`.
"""
SETTINGS = """\
| base model | someone/base |
| sentence encoder | someone/encoder, 12 wide |
| LoRA on slots | r 4, alpha 32 |
| gates | 2 layers, at most 2 extra passes |
| tokens per slot | 4, 2, segment |
"""


@pytest.fixture
def config() -> ArcAlignerConfig:
    names = {"base_model_name_or_path": "someone/base", "encoder_name_or_path": "someone/encoder"}
    text_config = {"model_type": "llama", "num_hidden_layers": 3}
    return ArcAlignerConfig(text_config=text_config, encoder_hidden_size=12, lora_r=4, gate_layers=[0, 2], **names)


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a run leaves: recipes, results, a processor that splits English sentences."""
    (tmp_path / "recipe.yaml").write_text(RECIPES)
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    rates = {"tokens_per_slot": 2, "trained_tokens_per_slot": [4, 2, "segment"]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"spacy_model": "en_core_web_sm", **rates}))
    return tmp_path


def read(folder: Path) -> tuple[dict, str]:
    """Metadata and text of the card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_the_card_has_settings_results_data_limits_and_license_and_what_the_hub_lists_a_model_by(config, folder):
    write_model_card(config, folder)
    metadata, text = read(folder)
    assert text.startswith("<!-- Written from the files beside it")
    for part in (SETTINGS, RESULT_TABLE, TRAINING):
        assert part in text
    assert re.findall("^#+ .*", text, re.M) == [
        "# ArcAligner", "## Limits", "## Use", "## Results", "## Training", "## License"
    ]  # fmt: skip
    expected = {"license": "apache-2.0", "language": "en", "library_name": "transformers"}
    expected |= {"pipeline_tag": "text-generation", "tags": ["arcaligner", "rag", "context-compression"]}
    expected |= {"base_model": "someone/base", "base_model_relation": "adapter"}
    assert metadata == expected | {"datasets": ["hotpotqa/hotpot_qa", "someone/questions", "wikimedia/wikipedia"]}


def test_card_without_results_and_recipe_says_nothing_of_them(config, tmp_path):
    config.base_model_name_or_path = str(tmp_path)
    write_model_card(config, tmp_path)
    metadata, text = read(tmp_path)
    assert "## Results" not in text and "## Training" not in text and "## Limits" in text
    assert not {"datasets", "base_model", "base_model_relation", "language"} & metadata.keys()
    assert f"| base model | {tmp_path} |" in text


def test_a_file_of_the_training_data_stands_for_its_data_sets(config, folder):
    files = "".join(f"  data/{name}: 0.25\n" for name in TRAINING_FILES)
    (folder / "recipe.yaml").write_text(f"stage: grounding\ntrain_files:\n{files}---\nstage: grounding\n")
    write_model_card(config, folder)
    metadata, text = read(folder)
    for place in (SQUAD, QED, HOTPOTQA, MUSIQUE, QAMR, WIKIPEDIA):
        title, licence = LICENCES[place]
        assert f"| {title} | {place} | {licence} | grounding |\n" in text
    assert metadata["datasets"] == sorted([SQUAD, HOTPOTQA, MUSIQUE, WIKIPEDIA])  # the others are not on the Hub
    assert "Stages: grounding in 2 parts." in text


def test_quick_start_loads_a_name_of_the_hub_and_installs_what_the_package_needs(config, folder):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    card = model_card(config, folder, "someone/aligner")
    assert 'pipeline("text-generation", model="someone/aligner", trust_remote_code=True)' in card
    for needed in REQUIREMENTS:
        assert f' "{needed}"' in card and any(each.startswith(f"{needed},") for each in declared)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.json", "{", "results.json does not hold results of an evaluation .* Expected .*Write them"),
        ("results.json", '{"sets": {"NQ": {"methods": {"arcaligner": {"f1": 3.0}}}}}', "does not hold results"),
        ("results.json", '{"sets": []}', "does not hold results"),
        ("recipe.yaml", "stage: a\n---\nstage: [", "(?s)recipe.yaml does not hold recipes of stages.*Put it there"),
        ("recipe.yaml", "stage: a\n---\ntrain_files: {a.jsonl: 1.0}\n", "does not hold recipes .*'stage'"),
        ("recipe.yaml", "- a list\n", "does not hold recipes of stages"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_and_no_card_is_written(config, folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_model_card(config, folder)
    assert not (folder / "README.md").exists()


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    assert is_hub_id("someone/data") and is_hub_id("some.one/da-ta_1")
    paths = ("../data", "./data", "/data/base", "data/train.jsonl.gz", "data/train.parquet", "a/b/c")
    assert not any(is_hub_id(name) for name in (None, "data", *paths))
    (tmp_path / "someone" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("someone/data")


def test_the_card_of_the_shipped_aligner_is_that_of_its_files(tmp_path):
    shipped = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
    for name in ("config.json", "processor_config.json", "recipe.yaml", "results.json", "README.md"):
        shutil.copyfile(shipped / name, tmp_path / name)
    write_model_card(ArcAlignerConfig.from_pretrained(tmp_path), tmp_path)
    assert (tmp_path / "README.md").read_text("utf-8") == (shipped / "README.md").read_text("utf-8")
