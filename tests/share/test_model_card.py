"""The model card agrees with the files next to it: data, tokens per slot, F1, limits, license."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from arcaligner.common.files import DEFAULT_CHECKPOINT, ROOT
from arcaligner.configuration_arcaligner import DEFAULT_BASE_MODEL, REQUIREMENTS, ArcAlignerConfig
from arcaligner.share.hub import is_hub_id, model_card, with_enough_questions, write_model_card

GATED_CHECKPOINT = DEFAULT_CHECKPOINT.with_name("arcaligner-smollm2-135m-gated")
# As `evaluation/results.py` writes them: F1, and more that is not for the card.
RESULTS = {
    "SQuAD": {"recall": [99.6, 99.0, 100.0], "methods": {"arcaligner": {"em": [5.0], "f1": [9.6512, 6.5, 13.2]}}},
    "NQ": {
        "passages": "gold",
        "questions": 500,
        "methods": {
            "arcaligner": {"questions": 500, "f1": [8.0]},
            "arcaligner_xsegment": {"questions": 300, "f1": [6.0]},
        },
    },
    "PopQA": {"methods": {"naive": {"f1": [8.0]}}},
}
RECIPES = """stage: reconstruction
train_files: {../data/recon_train.jsonl.gz: 0.5, "wikimedia/wikipedia?name=20231101.en&title=title": 0.5}
---
stage: grounding
train_files: {hotpotqa/hotpot_qa: 0.5, "../data/mine.parquet?text=body": 0.3, someone/questions: 0.2}
"""
RESULT_TABLE = """\
| Answers from | tokens of text per position | SQuAD | NQ |
| --- | --- | --- | --- |
| **slots** | 2 | 9.7 | 8.0 |
| **slots** | segment | - | 6.0 of 300 |
| *number of questions* |  | - | 500 |
| *which passages* |  | given | gold |
| *questions whose passages contain a gold answer* |  | 100 % | - |
"""
TRAINING = """\
| paragraphs of Wikipedia | wikimedia/wikipedia | CC BY-SA 3.0 and GFDL | reconstruction |
| HotpotQA | hotpotqa/hotpot_qa | CC BY-SA 4.0 | grounding |
| mine.parquet | mine.parquet | unknown | grounding |
| someone/questions | someone/questions | see its page on the Hub | grounding |

Stages: reconstruction, grounding. All settings are in `recipe.yaml`.
"""


@pytest.fixture
def config() -> ArcAlignerConfig:
    text_config = {"model_type": "llama", "num_hidden_layers": 3}
    return ArcAlignerConfig(text_config=text_config, encoder_hidden_size=12, base_model_name_or_path="someone/base")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The files of a finished run: recipes, results, and a processor for German sentences."""
    (tmp_path / "recipe.yaml").write_text(RECIPES)
    (tmp_path / "results.json").write_text(json.dumps({"sets": RESULTS}))
    compressions = {"tokens_per_slot": 2, "trained_tokens_per_slot": [4, 2, "segment"]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"spacy_model": "de_core_news_sm", **compressions}))
    return tmp_path


def metadata_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


@pytest.mark.parametrize("checkpoint", [DEFAULT_CHECKPOINT, GATED_CHECKPOINT], ids=lambda folder: folder.name)
def test_shipped_card_matches_its_files(tmp_path, checkpoint):
    """The card of a shipped aligner is made from its files."""
    for name in ("config.json", "processor_config.json", "recipe.yaml", "results.json", "README.md"):
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, tmp_path / name)
    assert write_model_card(ArcAlignerConfig.from_pretrained(tmp_path), tmp_path)
    assert (tmp_path / "README.md").read_text("utf-8") == (checkpoint / "README.md").read_text("utf-8")


def test_card_of_another_aligner(config, folder):
    """The card of another aligner has its results, data, language and name."""
    card = model_card(config, folder, "someone/aligner")
    assert RESULT_TABLE in card and TRAINING in card and "| tokens per slot | 4, 2, segment |" in card
    assert 'pipeline("text-generation", model="someone/aligner", trust_remote_code=True)' in card
    assert 'checkpoint = "path/to/this/folder"' in model_card(config, folder)
    metadata = metadata_of(card)
    assert metadata["datasets"] == ["hotpotqa/hotpot_qa", "someone/questions", "wikimedia/wikipedia"]
    assert (metadata["language"], metadata["base_model"]) == ("de", "someone/base")


def test_card_without_results(config, tmp_path):
    """A card without results and recipe does not mention them."""
    config.base_model_name_or_path = str(tmp_path)
    card = model_card(config, tmp_path)
    assert "## Results" not in card and "## Training" not in card and "## Limits" in card
    assert not {"datasets", "base_model", "base_model_relation", "language"} & metadata_of(card).keys()
    assert f"| base model | {tmp_path} |" in card


@pytest.mark.parametrize(
    ("base", "advice"), [(DEFAULT_BASE_MODEL, "use the project's default checkpoint"), ("someone/base", "with yours")]
)
def test_card_says_that_gates_are_on(config, folder, base, advice):
    """The card of an aligner whose gates are on says so in its title, and says what we measured."""
    config.base_model_name_or_path, config.gate_mode = base, "adaptive"
    card = model_card(config, folder)
    assert "# ArcAligner with gates\n" in card and advice in card and "on in 3 layers" in card
    config.gate_mode = "off"
    card = model_card(config, folder)
    assert "# ArcAligner\n" in card and advice not in card and "| off |" in card


def test_card_installs_the_requirements():
    """The card installs the requirements of the package."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert all(any(requirement.startswith(f"{needed},") for requirement in declared) for needed in REQUIREMENTS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.json", "{", "results.json does not contain results of an evaluation .*; expected .*Write the file"),
        ("results.json", '{"sets": {"NQ": {"methods": {"arcaligner": {"f1": 3.0}}}}}', "does not contain results"),
        ("results.json", '{"sets": []}', "does not contain results"),
        ("recipe.yaml", "stage: a\n---\nstage: [", "(?s)recipe.yaml does not contain recipes.*Correct or remove"),
        ("recipe.yaml", "stage: a\n---\ntrain_files: {a.jsonl: 1.0}\n", "does not contain recipes .*'stage'"),
        ("recipe.yaml", "- a list\n", "does not contain recipes of stages"),
    ],
)
def test_unreadable_file_stops_the_card(config, folder, name, content, message):
    """A file that cannot be read is refused, and no card is written."""
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_model_card(config, folder)
    assert not (folder / "README.md").exists()


def test_hub_names_and_paths(tmp_path, monkeypatch):
    """A name on the Hub is distinguished from a path."""
    assert is_hub_id("someone/data") and is_hub_id("some.one/da-ta_1")
    paths = ("../data", "./data", "/data/base", "data/train.jsonl.gz", "data/train.parquet", "a/b/c")
    assert not any(is_hub_id(name) for name in (None, "data", *paths))
    (tmp_path / "someone" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("someone/data")


def test_few_questions_are_left_out():
    """A data set of few questions is left out unless no other has more; one of unknown size stays."""
    few, many, unsaid = {"questions": 49}, {"questions": 50}, {}
    assert with_enough_questions({"a": few, "b": many, "c": unsaid}) == {"b": many, "c": unsaid}
    assert with_enough_questions({"a": few}) == {"a": few}
