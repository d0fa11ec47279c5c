"""A corpus from the command line: built, queried, changed, described."""

import re
from pathlib import Path

from conftest import pipeline_of

from arcaligner.apps.cli import app as cli
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.table import Corpus
from arcaligner.common.files import printable

DOCUMENT = Path(__file__).parents[3] / "docs" / "corpus.md"


def test_folder_becomes_answer(run_cli, letters, checkpoint_dir, tmp_path, model, processor, monkeypatch):
    (letters / "binary.txt").write_bytes(b"\0\xff")
    folder, aligner = tmp_path / "corpus", ("--checkpoint", checkpoint_dir)
    options = ("--passage-tokens", 36, *aligner)
    code, out, err = run_cli("corpus", "build", letters, "--output", folder, *options)
    assert code == 0 and "2 documents added, 0 replaced, 0 removed, 0 unchanged, 1 skipped." in out
    assert "binary.txt is not text in UTF-8" in err and "Loading weights" not in err
    info = (corpus := Corpus(folder)).info()
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    summary = f"The corpus has {info['passages']} passages of 2 documents, with {info['slots']} slots: {num_bytes:,} "
    summary += "bytes on disk."
    assert summary in out and (info["bytes"], info["precomputed_bytes"]) == (num_bytes, 0)
    (letters / "new\nline.txt").write_text("Ada wrote it.")
    for number in range(4):
        (letters / f"{number}.svg").write_text("<svg/>")
    code, out, err = run_cli("corpus", "build", letters, "--output", folder, *aligner)  # in passages as before
    assert code == 0 and "1 document added, 0 replaced, 0 removed, 2 unchanged, 5 skipped." in out
    assert err.count("Skipped: ") == 5 and "3.svg has the suffix .svg; expected" in err

    question = "Who wrote it?"
    code, out, err = run_cli("ask", question, "--corpus", folder, "--top-k", 2, "--max-new-tokens", 5, *aligner)
    retrieved = Retriever(corpus, processor)(question, top_k=2)
    row = {"question": question, "documents": retrieved.documents}
    record = pipeline_of(model, processor)(row, return_slots=True, max_new_tokens=5)[0]
    assert code == 0 and out.startswith(printable(record["generated_text"].strip()))
    places = [f"{passage['document']}:{passage['start']}-{passage['end']}" for passage in retrieved.documents]
    places = [place.replace("\n", "\\n") for place in places]
    assert any("new\\nline.txt" in place for place in places)
    assert [line.split(" ")[0] for line in out.splitlines()[-2:]] == places
    assert cli.compression_summary(record["statistics"]) in err
    assert "First token after" in err and all(part in err for part in ("retrieval ", "slots ", "model "))

    assert "The answer does not appear word for word in the passages; please check it." in err
    find = lambda answer, text: {"start": 3, "end": 5} if "Radik" in text else None  # noqa: E731
    monkeypatch.setattr("arcaligner.apps.server.request.find_answer", find)
    _, out, err = run_cli("ask", question, "--corpus", folder, "--top-k", 9, "--max-new-tokens", 5, *aligner)
    assert "letter.txt:66-132, the answer at 69-71" in out and out.count("the answer at") == 1 and "none of" not in err

    code, _, _ = run_cli("corpus", "remove", "letters/new\nline.txt", "--corpus", folder)
    code, out, _ = run_cli("corpus", "info", "--corpus", folder)
    assert re.search(r"^bytes_per_passage: \d+$", out, re.MULTILINE)
    assert code == 0 and {"documents: 2", "passage_tokens: 36", "tokens_per_slot: segment"} <= {*out.splitlines()}


def test_strict_build_fails_last(run_cli, letters, checkpoint_dir, tmp_path):
    """With `--strict` an unreadable source is an error at the end of the build; everything else is in the corpus."""
    folder, aligner = tmp_path / "corpus", ("--checkpoint", checkpoint_dir)
    build = ("corpus", "build", letters, "--output", folder, "--strict", *aligner)
    assert run_cli(*build)[0] == 0
    (letters / "a.txt").write_bytes(b"\0\xff")
    (letters / "new.txt").write_text("Ada wrote it.")
    for command in (build, ("corpus", "add", letters, "--corpus", folder, "--strict", *aligner)):
        code, out, err = run_cli(*command)
        last = err.splitlines()[-1]
        assert code == 1 and "Error: 1 of the files and rows was skipped. The first one: " in last
        assert "a.txt is not text in UTF-8" in last and "1 skipped." in out
    assert len(Corpus(folder).documents()) == 3


def test_verbose_names_all_skipped(run_cli, letters, checkpoint_dir, tmp_path):
    """Of many skipped files the first are named, with `--verbose` all; `add` needs an existing corpus."""
    for number in range(22):
        (letters / f"{number}.svg").write_text("<svg/>")
    folder, aligner = tmp_path / "corpus", ("--checkpoint", checkpoint_dir)
    code, _, err = run_cli("corpus", "add", letters, "--corpus", folder, *aligner)
    assert code == 1 and not folder.exists()
    _, _, err = run_cli("corpus", "build", letters, "--output", folder, *aligner)
    assert err.count("Skipped: ") == 21 and "Skipped: 2 more (`--verbose` lists all)" in err
    code, out, err = run_cli("corpus", "add", letters, "--corpus", folder, "--verbose", *aligner)
    assert code == 0 and "0 documents added" in out
    assert all(f"{number}.svg has the suffix" in err for number in range(22)) and " more" not in err


def test_user_errors_print_one_line(run_cli, letters, corpus, checkpoint_dir, tmp_path):
    (empty := tmp_path / "empty.txt").write_text(" ")
    aligner = ("--checkpoint", checkpoint_dir)
    existing, new = (("--output", folder, *aligner) for folder in (corpus.path, tmp_path / "new"))
    for arguments, message in (
        (
            ("corpus", "build", letters, "--passage-tokens", 9, *existing),
            "`passage_tokens` 36, but the checkpoint or the command asks for 9",
        ),
        (
            ("corpus", "build", letters, "--passage-words", 9, *existing),
            "`passage_tokens` 36, but the checkpoint or the command asks for 13",
        ),
        (("corpus", "build", letters, "typo/", *existing), "There is no file or folder typo/. Correct the path"),
        (("corpus", "build", empty, *new), "Found no document with text"),
        (("corpus", "build", "no/where", *new), "reach 'no/where' on the Hub"),
        (("ask", " ", "--corpus", corpus.path, *aligner), "The question is empty"),
    ):
        code, out, err = run_cli(*arguments)
        assert code == 1 and out == ""
        assert err.splitlines()[-1].startswith("Error: ") and message in err.splitlines()[-1]
    assert not (tmp_path / "new").exists()  # a build without documents creates no folder


def test_documented_code_answers(capsys, letters, checkpoint_dir, monkeypatch):
    """The code in the documentation answers from a folder."""
    block, _ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(letters.parent)
    exec(block.replace("checkpoints/arcaligner-smollm2-135m", str(checkpoint_dir)), {})  # noqa: S102
    assert "letters/letter.txt:0-" in capsys.readouterr().out
