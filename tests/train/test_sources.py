"""Sources of rows: files and data sets of the Hub, of three kinds, become rows of one schema.

A folder of the working directory stands for a data set of the Hub: 🤗 Datasets reads both by the same name.
"""

import json

import datasets
import pytest
from training_rows import HOTPOTQA, question_rows, write_rows

from arcaligner.common.rows import read_rows
from arcaligner.train.examples import open_corpus

WORDS = [f"word{number}" for number in range(23)]


def schema_rows(count):
    """The rows of `question_rows` with the keys of the schema only."""
    keys = ("id", "question", "answers", "passages")
    return [{key: row[key] for key in keys} | {"gold": []} for row in question_rows(count)]


def write_parquet(path, **columns) -> str:
    datasets.Dataset.from_dict(columns).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_changed_files_are_read_again(tmp_path, name):
    """Plain and gzipped rows are loaded, and loaded again after the file has changed."""
    path = write_rows(tmp_path / name, question_rows(2))
    assert read_rows(path) == [row | {"gold": []} for row in question_rows(2)]
    before = open_corpus(path)
    assert list(before) == schema_rows(2) and before._fingerprint == open_corpus(path)._fingerprint
    after = open_corpus(write_rows(tmp_path / name, question_rows(3)))
    assert list(after) == schema_rows(3) and before._fingerprint != after._fingerprint


BAD_LINES = {
    '{"passages": [{"text": 7}]}': r"line 2: `passages\[0\].text` is 7 \(int\); expected a string\.",
    '{"passages": "text"}': r"line 2: `passages` is 'text' \(str\); expected a list of passages, each a string or {",
    '{"passages": [["text"]]}': r"line 2: `passages\[0\]` is \['text'\] \(list\); expected a string or {",
    '{"answers": "Ada"}': r"""line 2: `answers` is 'Ada' \(str\); expected a list of strings, such as \["...\"]""",
    '{"answers": ["Ada", 7]}': r"line 2: `answers\[1\]` is 7 \(int\); expected a string\.",
    '{"question": 7, "answers": []}': r"line 2: `question` is 7 \(int\); expected a string\.",
    '{"meta": {"gold": [1]}}': r"line 2: `meta.gold` is \[1\]; expected numbers of .* in a row with 0 passages",
    '{"meta": 1}': r"line 2: `meta` is 1 \(int\); expected an object such as",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(question_rows(1)[0])}\n{line}\n")
    with pytest.raises(ValueError, match=BAD_LINES[line]):
        open_corpus(str(path))
    with pytest.raises(ValueError, match="line 2 lacks id, "):  # `read_rows` needs all fields
        read_rows(path)


def test_passages_may_be_texts(tmp_path):
    """A passage is a text or an object."""
    row = question_rows(1)[0] | {"passages": ["Ada wrote it.", {"title": "Loom", "text": "It wove."}]}
    expected = [{"title": "", "text": "Ada wrote it."}, {"title": "Loom", "text": "It wove."}]
    path = write_rows(tmp_path / "rows.jsonl", [row])
    assert open_corpus(path)[0]["passages"] == read_rows(path)[0]["passages"] == expected
    parquet = write_parquet(tmp_path / "rows.parquet", passages=[["Ada wrote it."]], question=["Who?"], answers=[["A"]])
    assert open_corpus(parquet)[0]["passages"] == expected[:1]


@pytest.mark.parametrize("name", ["good.csv", "rows", "rows.jsonl.zst"])
def test_other_files_are_refused(tmp_path, monkeypatch, name):
    """Files with another suffix are refused at once, and not looked up on the Hub."""
    (tmp_path / name).write_text("question,answer")
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(ValueError, match=f"{name} is a file of an unsupported kind; expected one of .jsonl"):
        open_corpus(name, data_dir=str(tmp_path))


@pytest.mark.parametrize("line", ["{", "7", '{"id": "1", "question'])
def test_broken_line_costs_one_line(tmp_path, caplog, line):
    """A broken line is named in a warning; empty lines are skipped, and rows are numbered by their lines."""
    path = tmp_path / "rows.jsonl"
    rows = [row | {"id": None} for row in question_rows(2)]
    path.write_text(f"{json.dumps(rows[0])}\n{line}\n\n{json.dumps(rows[1])}\n\n")
    assert [row["id"] for row in open_corpus(str(path))] == ["0", "3"] == [row["id"] for row in read_rows(path)]
    assert f"{path}, line 2 is not a JSON object" in caplog.text
    path.write_text(f"{line}\n")
    for read_file in (read_rows, lambda path: open_corpus(str(path))):
        with pytest.raises(ValueError, match="line 1 is not a JSON object"):
            read_file(path)


def test_missing_fields_are_empty(tmp_path):
    texts = {"passages": [{"text": "Text."}, {"title": "T"}], "meta": {"gold": [1]}}
    rows = [
        {"answers": ["  ", None, " Ada "], "note": 7},
        {"id": "b", "question": None, "answers": None} | texts,
        {"id": "c", "passages": None, "note": "another type"},
    ]
    empty = {"question": "", "answers": [], "passages": [], "gold": []}
    assert list(open_corpus(write_rows(tmp_path / "rows.jsonl", rows))) == [
        empty | {"id": "0", "answers": ["Ada"]},
        empty | {"id": "b", "passages": [{"title": "", "text": "Text."}, {"title": "T", "text": ""}], "gold": [1]},
        empty | {"id": "c"},
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "texts.parquet", "hotpotqa.parquet"])
def test_null_ids_become_numbers(tmp_path, name):
    """Rows of each kind whose id is null get their number."""
    rows = {"texts.parquet": 3 * [{"text": "A text."}], "hotpotqa.parquet": 3 * [HOTPOTQA]}.get(name, question_rows(3))
    rows = [row | {"id": row_id} for row, row_id in zip(rows, ("a", None, None), strict=True)]
    path = tmp_path / name
    write_rows(path, rows) if name == "rows.jsonl" else datasets.Dataset.from_list(rows).to_parquet(path)
    suffix = "-0" if name == "texts.parquet" else ""
    corpus = open_corpus(str(path))
    assert [row["id"] for row in corpus] == [f"{row_id}{suffix}" for row_id in ("a", 1, 2)]
    # Only the paragraphs of HotpotQA that the answer needs: the others would decide what is held out.
    assert corpus[0]["gold"] == [] and len(corpus[0]["passages"]) == (2 if name == "hotpotqa.parquet" else 1)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_texts_are_cut_into_passages(tmp_path, suffix):
    """A column of texts is cut into passages of one length."""
    path = tmp_path / f"texts.{suffix}"
    texts = [" ".join(WORDS), "A  short\none.", "", None]
    table = datasets.Dataset.from_dict({"body": texts, "head": ["T", None, "U", "V"], "year": [1, 2, 3, 4]})
    table.to_parquet(path) if suffix == "parquet" else table.to_json(path)
    one, two = (open_corpus(f"{path}?text=body&title=head", passage_words=10, num_proc=number) for number in (1, 2))
    assert list(one) == list(two)
    assert [(row["id"], row["passages"]) for row in one] == [
        ("0-0", [{"title": "T", "text": " ".join(WORDS[:10])}]),
        ("0-1", [{"title": "T", "text": " ".join(WORDS[10:20])}]),
        ("0-2", [{"title": "T", "text": " ".join(WORDS[20:])}]),
        ("1-0", [{"title": "", "text": "A short one."}]),
        ("2-0", [{"title": "U", "text": ""}]),
        ("3-0", [{"title": "V", "text": ""}]),
    ]
    assert all((row["question"], row["answers"]) == ("", []) for row in one)
    other = open_corpus(f"{path}?text=body&title=head", passage_words=100)
    assert len(other) == 4 and other._fingerprint != one._fingerprint


def test_hub_configuration_and_split(tmp_path, monkeypatch):
    """A data set of the Hub is read by configuration and split."""
    monkeypatch.chdir(tmp_path)  # where a folder stands for the set
    folder, card = tmp_path / "org" / "corpus", "---\nconfigs:\n"
    for name in ("en", "de"):
        (folder / name).mkdir(parents=True)
        card += f"- config_name: {name}\n  data_files:\n"
        for split in ("train", "validation"):
            write_parquet(folder / name / f"{split}.parquet", text=[f"The {split} text, {name}."])
            card += f"  - split: {split}\n    path: {name}/{split}.parquet\n"
    (folder / "README.md").write_text(f"{card}---\n")
    for query, text in [("name=de", "The train text, de."), ("name=en&split=validation", "The validation text, en.")]:
        (row,) = open_corpus(f"org/corpus?{query}", data_dir="of files alone")
        assert row["passages"] == [{"title": "", "text": text}]
    with pytest.raises(ValueError, match="org/corpus cannot be read: .*[Uu]nknown split"):
        open_corpus("org/corpus?name=en&split=test")


def test_hub_texts_are_streamed(tmp_path, monkeypatch):
    """Enough passages are taken from the first texts of each file, and no file is loaded whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    for file in range(3):
        texts = [f"File {file} text {number}. " + "word " * (number % 2) for number in range(50)]
        write_parquet(tmp_path / "org" / f"train-{file}.parquet", text=texts, name=[f"n{file}"] * 50)
    load, streamed = datasets.load_dataset, []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **keys: streamed.append(keys["streaming"]) or load(*args, **keys)
    )
    rows = list(open_corpus("org?title=name", passage_words=4, at_least=10))
    passages = [("n0", "File 0 text 0."), ("n0", "File 0 text 1."), ("n0", "word")]
    assert [(passage["title"], passage["text"]) for row in rows for passage in row["passages"]][:3] == passages
    numbers = [row["passages"][0]["title"] for row in rows]
    assert [numbers.count(f"n{file}") for file in range(3)] == [3, 3, 4]
    assert len({row["id"] for row in rows}) == len(rows) == 10
    assert streamed and all(streamed)
    with pytest.raises(ValueError, match=r"org\?text=body has the columns name, text, but not body"):
        open_corpus("org?text=body", at_least=10)


def test_hub_questions_are_read_whole(tmp_path, monkeypatch):
    """A limit streams texts only: questions are drawn from the whole data set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    write_rows(tmp_path / "org" / "train.jsonl", question_rows(6))
    assert list(open_corpus("org", at_least=1)) == schema_rows(6)


def test_unknown_rows_are_refused(tmp_path):
    """A file without rows of a known kind is refused."""
    body = write_parquet(tmp_path / "letters.parquet", body=["Dear Ada."])
    with pytest.raises(ValueError, match=r"columns body, but not text.*`\?text=body`"):
        open_corpus(body)
    with pytest.raises(ValueError, match="letters.parquet.* has no column `question`"):
        open_corpus(f"{body}?text=body", asks=True)
    path = tmp_path / "none.parquet"
    datasets.Dataset.from_dict({"text": []}, features=datasets.Features(text=datasets.Value("string"))).to_parquet(path)
    with pytest.raises(ValueError, match="none.parquet cannot be read: .* no data"):
        open_corpus(str(path))
    with pytest.raises(ValueError, match=r"unknown options \(splt\); expected .*split"):
        open_corpus("rows?splt=train")
    with pytest.raises(ValueError, match=r"options without a value \(split\)"):
        open_corpus("rows?split=")
    for name, content in (("none.jsonl", b""), ("broken.parquet", b"PAR1 and no more")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            open_corpus(str(tmp_path / name))


def test_data_folder_is_searched(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(2))
    assert list(open_corpus("rows.jsonl", data_dir=str(tmp_path))) == list(open_corpus(path, data_dir="elsewhere"))
    with pytest.raises(
        FileNotFoundError, match="no file elsewhere/rows.jsonl.*relative to the folder of the data, 'elsewhere'"
    ):
        open_corpus("rows.jsonl", data_dir="elsewhere")
