"""Public sets become the training files that the recipes name, also after a run that broke off.

A folder of copies stands for the Hub: each set has the columns and the layout of files that it has there.
"""

import json
from dataclasses import replace

import datasets
import pytest
import yaml
from training_rows import HOTPOTQA, MUSIQUE

from arcaligner.common.data_sets import TRAINING_FILES
from arcaligner.common.files import ROOT
from arcaligner.common.rows import read_rows
from arcaligner.train import prepare_data
from arcaligner.train.examples import open_corpus
from arcaligner.train.prepare_data import SOURCES, prepare, read_limits

ANSWERS = {"text": ["Ada", "Ada"], "answer_start": [0, 0]}
TEXT = {"title": "Ada_Lovelace", "context": "Ada wrote it in 1843.", "answers": ANSWERS}
SQUAD = [TEXT | {"id": f"s{number}", "question": f"Who wrote it, {number}?"} for number in range(7)]
QED = {
    "example_id": -32,
    "title_text": "Fortnite",
    "question_text": "who made it",
    "paragraph_text": "`` Fortnite '' ( 2017 ) was n't made by Ada , but by Epic .",
    "original_nq_answers": [[{"start": 0, "end": 4, "string": "Epic ."}], [{"string": "Epic"}, {"string": "Ada"}]],
    "annotation": {"explanation_type": "multi_sentence", "answer": []},
}
QED_NONE = QED | {"example_id": 5, "annotation": {"explanation_type": "none", "answer": [{"bridge": "of"}]}}
LONG_QUESTION = "What happened to boats when the larger ships came?"  # as long as a question may be
QAMR = (
    "#Wiki1k:1:2\nShips that grew replaced riverboats.\n"
    f"{'What replaced riverboats?':50}Ships\tShips\n{LONG_QUESTION}replaced\tgrew\n\n"
)


def article(number: int) -> dict:
    """An article of Wikipedia, with a heading, a line of a list and one paragraph of 20 words."""
    text = f"Heading\n\n* A line\n\nArticle {number} has one paragraph of twenty words" + " and more" * 6
    return {"id": str(number), "url": "u", "title": f"Article {number}", "text": text}


def hub_layout(folder, configs: dict[str, str]) -> None:
    """The card of a data set, which names the files of its configurations."""
    files = {name: [{"split": "train", "path": path}] for name, path in configs.items()}
    card = {"configs": [{"config_name": name, "data_files": entries} for name, entries in files.items()]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


@pytest.fixture
def copies(tmp_path):
    def files_of(name: str, **files):
        folder = tmp_path / "copies" / name
        for file, rows in files.items():
            path = folder / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(rows, str):
                path.write_text(rows)
            else:
                datasets.Dataset.from_list(rows).to_parquet(f"{path}.parquet")
        return folder

    hub_layout(files_of("rajpurkar/squad", plain_text__train=SQUAD), {"plain_text": "plain_text/train*"})
    hotpotqa = files_of("hotpotqa/hotpot_qa", distractor__train=[HOTPOTQA], fullwiki__train=[HOTPOTQA | {"id": "no"}])
    hub_layout(hotpotqa, {"distractor": "distractor/train*", "fullwiki": "fullwiki/train*"})
    rows = {"train": MUSIQUE, "dev": MUSIQUE | {"id": "no"}}
    lines = {f"musique_ans_v1.0_{split}.jsonl": json.dumps(row) + "\n" for split, row in rows.items()}
    files_of("dgslibisey/MuSiQue", **lines)
    qed = "".join(json.dumps(row) + "\n" for row in (QED, QED_NONE))
    files_of("google-research-datasets/QED", **{"qed-train.jsonlines": qed})
    files_of("uwnlp/qamr", **{"data__readable__dev.tsv": QAMR, "data__readable__test.tsv": QAMR.replace(":1:2", ":3")})
    # Ten articles in two files; one has no paragraph, two have the same, one is in SQuAD.
    articles = [article(number) for number in range(10)]
    articles[2] |= {"text": "Nothing."}
    articles[4] |= {"text": articles[3]["text"]}
    articles[5] |= {"title": "Ada Lovelace"}
    parts = {"20231101.en__train-0": articles[:4], "20231101.en__train-1": articles[4:]}
    hub_layout(files_of("wikimedia/wikipedia", **parts), {"20231101.en": "20231101.en/train-*"})
    return tmp_path / "copies"


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def source_of(name: str, **changes) -> prepare_data.Source:
    (source,) = [source for source in SOURCES if source.name == name]
    return replace(source, **changes)


def test_sets_become_rows(copies, data):
    """Each data set becomes rows of the files that recipes name."""
    prepare(data, SOURCES, copies)
    rows = {row["id"]: row for name in TRAINING_FILES for row in read_rows(data / name)}
    squad = {"title": "Ada Lovelace", "text": "Ada wrote it in 1843."}
    assert [rows[f"squad_s{number}"]["question"] for number in range(7)] == [row["question"] for row in SQUAD]
    assert (rows["squad_s0"]["answers"], rows["squad_s0"]["passages"]) == (["Ada"], [squad])
    cy = {"title": "Cy", "text": "No."}
    assert rows["hotpotqa_h1"] == {
        "id": "hotpotqa_h1",
        "question": "Was Ada born before Ben?",
        "answers": ["yes"],
        "passages": [cy, {"title": "Ada", "text": "Ada was born. In 1815."}, {"title": "Ben", "text": "Ben."}],
        "dataset": "hotpotqa/hotpot_qa",
        "meta": {"gold": [1, 2]},
        "gold": [1, 2],
    }
    assert (rows["musique_m1"]["answers"], rows["musique_m1"]["gold"]) == (["Ada", "A."], [1])
    text = '"Fortnite" (2017) wasn\'t made by Ada, but by Epic.'
    assert rows["qed_-32"]["passages"] == [{"title": "Fortnite", "text": text}]
    assert rows["qed_-32"]["answers"] == ["Epic.", "Epic, Ada"] and "qed_5" not in rows
    sentence = {"title": "", "text": "Ships that grew replaced riverboats."}
    questions = [(row["question"], row["answers"]) for row in rows.values() if row["passages"] == [sentence]]
    assert questions == 2 * [("What replaced riverboats?", ["Ships"]), (LONG_QUESTION, ["replaced", "grew"])]
    assert len(read_rows(data / "train_qa.jsonl.gz")) == 7 + 1 + 1 + 1
    for path in sorted((ROOT / "train" / "recipes").glob("*/*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        if recipe.get("data_dir") == "data":
            sources = [recipe.get(key, {}) for key in ("train_files", "eval_files", "reconstruction_files")]
            for name in {name for source in sources for name in source} | {*filter(None, [recipe.get("train_file")])}:
                assert len(open_corpus(name, data_dir=str(data), asks=name.startswith("train_"))), f"{path}: {name}"


def test_held_out_articles_differ(copies, data):
    """Held-out paragraphs are of articles that are not trained on."""
    prepare(data, SOURCES, copies)
    trained, held_out = (read_rows(data / f"recon_{part}.jsonl.gz") for part in ("train", "heldout"))
    assert len(trained) == 7 and len(held_out) == 1
    ids = {row["id"] for row in (*trained, *held_out)} - {"wikipedia_3", "wikipedia_4"}
    assert ids == {f"wikipedia_{number}" for number in (0, 1, 5, 6, 7, 8, 9)}
    assert held_out[0]["passages"][0]["title"] != "Ada Lovelace"
    for row in (*trained, *held_out):
        assert row["question"] == "" and row["answers"] == [] and len(row["passages"][0]["text"].split()) == 20


def test_limit_applies_to_each_file(copies, data):
    """A limit takes the same number of rows from each file of a data set."""
    prepare(data, [source_of("wikipedia", limit=4)], copies)
    ids = {row["id"] for part in ("train", "heldout") for row in read_rows(data / f"recon_{part}.jsonl.gz")}
    assert ids == {"wikipedia_0", "wikipedia_1", "wikipedia_4", "wikipedia_5"}


def test_interrupted_run_keeps_complete_files(copies, tmp_path, data):
    """After an interruption only complete files are kept, and the next run ends with the files of a whole run."""

    def lose(row):
        raise ConnectionError("lost")

    squad, musique, qamr = (source_of(name) for name in ("squad", "musique", "qamr"))
    prepare(tmp_path / "whole", [squad, musique, qamr], copies)
    for sources in ([squad, replace(musique, to_rows=lose)], [squad, musique, replace(qamr, to_rows=lose)]):
        with pytest.raises(ConnectionError):
            prepare(data, sources, copies)
        assert not (data / "train_extra.jsonl.gz").exists()
    prepare(data, [replace(squad, to_rows=lose), musique, qamr], copies)  # its file is not made again
    (data / "train_extra.jsonl.gz").unlink()
    prepare(data, [qamr], copies)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert files == {path.name: path.read_bytes() for path in data.iterdir()}


def test_licences_and_finished_files(copies, data, capsys, monkeypatch):
    """Licences are written next to the files, and finished files are kept."""
    prepare_data.main(data, ["squad=3", "wikipedia=0"], copies)
    page = (data / "README.md").read_text()
    assert "## train_qa.jsonl.gz" in page and "| SQuAD 1.1 | CC BY-SA 4.0 | rajpurkar/squad, a local copy | 3 |" in page
    assert "| MuSiQue | CC BY 4.0 |" in page and "Wikipedia |" not in page
    assert page in capsys.readouterr().out
    before = {path: path.read_bytes() for path in data.iterdir()}
    assert {path.name for path in before} == {"train_qa.jsonl.gz", "train_extra.jsonl.gz", "README.md"}
    monkeypatch.setattr(prepare_data, "_make", None)
    prepare(data, SOURCES[:1], copies)
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    assert "train_qa.jsonl.gz exists and was not changed. Delete the file to make it again" in capsys.readouterr().out


def test_missing_set_and_unknown_format(copies, data, tmp_path):
    """A missing set and a row in another format are named."""
    with pytest.raises(OSError, match=r"rajpurkar/squad cannot be read.*--copies"):
        prepare(data, [source_of("squad")], tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"rajpurkar/squad has a row in an unexpected format .*KeyError: 'paragraphs'"):
        prepare(data, [source_of("squad", to_rows=lambda row: [row["paragraphs"]])], copies)
    for limit, message in (("squat=3", "Did you mean `squad`"), ("squad=all", "expected a whole number of rows")):
        with pytest.raises(ValueError, match=message):
            read_limits([limit])
