"""A corpus is built once; a later build keeps unchanged documents and replaces changed ones."""

import gzip
import json
import warnings
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest.mock import Mock

import lancedb
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import new_processor
from pdf_files import line, pdf
from training_rows import write_rows

from arcaligner.apps.corpus import build
from arcaligner.apps.corpus.build import build_corpus, passage_rows
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.sources import read_documents
from arcaligner.apps.corpus.table import METADATA, Corpus
from arcaligner.common.passages import passages_of
from arcaligner.tokenization_arcaligner import readable


def rows_of(corpus):
    return corpus.table.search().to_arrow().sort_by("id")


def test_markdown_heading_becomes_the_title(tmp_path):
    """The heading of a Markdown file is its title, and is not encoded again with the text."""
    fenced, long = "Run this:\n```\n# install\n```\nmake", "# " + "long " * 201 + "\nEnd."
    for name, text in (("a", "\n# Ada \nShe wrote."), ("b", "# Alone"), ("c", fenced), ("d", long)):
        (tmp_path / f"{name}.md").write_text(text)
    documents = [(document.title, document.text) for document in read_documents([str(tmp_path)], pytest.fail)]
    assert documents == [("Ada", "\n      \nShe wrote."), ("", "# Alone"), ("", fenced), ("", long)]


def test_killed_build_resumes(tmp_path, monkeypatch, processor, make_corpus):
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 2)
    rows = [{"id": number, "text": f"Sentence {number} stands here. It ends."} for number in range(7)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    corpus = make_corpus()

    def killed(report):
        if report.added == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus([source], corpus, processor, on_batch=killed)
    report = build_corpus([source], Corpus(corpus.path), processor)
    assert (report.added, report.unchanged, report.passages) == (3, 4, 3)
    assert rows_of(corpus).equals(rows_of(make_corpus(source, name="whole")))
    assert corpus.info()["documents"] == corpus.info()["passages"] == 7 and corpus.info()["slots"] == 14


def numbered_rows(tmp_path, monkeypatch):
    """A file of seven rows, some with several passages, which a build encodes in four batches."""
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 2)
    texts = [f"Sentence {number} stands here. It ends. " * (1 + number % 3) for number in range(7)]
    return write_rows(tmp_path / "rows.jsonl", [{"id": number, "text": text} for number, text in enumerate(texts)])


@pytest.mark.slow
def test_processes_make_the_same_table(tmp_path, monkeypatch, processor, make_corpus):
    """Several processes give the rows, their order and the report of one, for new, changed and unchanged documents."""
    source = Path(numbered_rows(tmp_path, monkeypatch))
    whole, changed = source.read_text(), source.read_text().replace("2 stands", "2 is")
    source.write_text("".join(changed.splitlines(keepends=True)[:3]))
    made = [make_corpus(source, name=name, passage_tokens=24) for name in ("one", "several")]
    source.write_text(whole)
    reports = [
        build_corpus([str(source)], corpus, processor, processes=number)
        for number, corpus in zip((1, 2), made, strict=True)
    ]
    assert reports[0] == reports[1]
    assert (reports[0].added, reports[0].replaced, reports[0].unchanged) == (4, 1, 2) and reports[0].passages > 5
    assert made[0].table.search().to_arrow().equals(made[1].table.search().to_arrow())


def test_killed_worker_keeps_written_rows(tmp_path, monkeypatch, processor, make_corpus):
    """If a worker dies, for example for lack of memory, the build ends with an error, and the next one continues."""
    source, corpus, batches = numbered_rows(tmp_path, monkeypatch), make_corpus(), []

    class Pool:
        """A pool whose second batch ends its process."""

        def __init__(self, processes, context, initializer, initargs):
            initializer(*initargs)

        def __enter__(self):
            return self

        def __exit__(self, *raised):
            return False

        def submit(self, work, documents):
            batches.append(documents)
            if len(batches) == 2:
                (broken := Future()).set_exception(BrokenProcessPool())
                return broken
            (done := Future()).set_result(work(documents))
            return done

    threads = torch.get_num_threads()
    monkeypatch.setattr(build, "ProcessPoolExecutor", Pool)
    with pytest.raises(OSError, match="One of the 2 encoding processes ended.*fewer processes"):
        build_corpus([str(source)], corpus, processor, processes=2)
    torch.set_num_threads(threads)
    report = build_corpus([str(source)], corpus, processor)
    assert (report.unchanged, report.added) == (2, 5)
    with pytest.raises(ValueError, match="`processes` is 0; expected at least 1"):
        build_corpus([str(source)], corpus, processor, processes=0)


@pytest.mark.parametrize("before", ["", "Short."])
def test_large_document_in_parts(tmp_path, monkeypatch, processor, make_corpus, before):
    """A large document is encoded in parts and written in one step."""
    monkeypatch.setattr(build, "PART_PASSAGES", 3)
    (source := tmp_path / "long.txt").write_text(before)
    corpus = make_corpus(*[source] * bool(before), passage_tokens=24)
    version, versions = corpus.table.version, []
    source.write_text(" ".join(f"Sentence {number} stands here." for number in range(11)))
    build_corpus([str(source)], corpus, processor, on_batch=lambda report: versions.append(corpus.table.version))
    assert versions == [version + 1]
    passages = passages_of(read_documents([str(source)], pytest.fail, tmp_path), 24, "en", processor.tokenizer)
    expected = passage_rows(passages, processor, corpus)
    assert len(corpus) == 11 and rows_of(corpus).equals(expected.sort_by("id").select(rows_of(corpus).column_names))


def test_passages_have_page_or_heading(tmp_path, processor, make_corpus):
    """Passages have the page or the heading above them."""
    (tmp_path / "a.md").write_text("# Ships\n\nOf oak and of pine.\n\n## Sails\n\nLinen sails here.\n\n## Oars\n\nOak.")
    (tmp_path / "b.pdf").write_bytes(pdf(line(50, 700, "Anna brings the cake."), line(50, 700, "Bob came late.")))
    corpus = make_corpus(tmp_path / "a.md", tmp_path / "b.pdf", passage_tokens=24)
    rows = [(row["title"], row["page"], row["text"]) for row in rows_of(corpus).to_pylist()]
    assert rows == [
        ("Ships", None, "Of oak and of pine."),
        ("Ships › Sails", None, "## Sails\n\nLinen sails here."),
        ("Ships › Oars", None, "## Oars\n\nOak."),
        ("", 1, "Anna brings the cake."),
        ("", 2, "Bob came late."),
    ]
    documents = Retriever(corpus, processor)("Who brings the cake?", 5).documents
    assert {document["page"] for document in documents} == {None, 1, 2}


def test_changed_document_is_replaced(corpus, letters, processor):
    """A changed document is replaced in one step, and a removed one is gone."""
    before, version = rows_of(corpus).to_pylist(), corpus.table.version
    letter, ski = "letters/letter.txt", "letters/old/ski.md"
    (letters / "letter.txt").write_text("Short now.", encoding="utf-8")
    seen = []
    report = build_corpus([str(letters)], corpus, processor, on_batch=lambda report: seen.append(corpus.table.version))
    assert (report.added, report.replaced, report.unchanged) == (0, 1, 1) and seen == [version + 1]
    after = rows_of(corpus).to_pylist()
    assert [row for row in after if row["document"] == ski] == [row for row in before if row["document"] == ski]
    assert [row["text"] for row in after if row["document"] == letter] == ["Short now."]
    with pytest.raises(ValueError, match="has no document 'none'"):
        corpus.remove([letter, "none"])
    corpus.remove([letter])
    assert corpus.documents() == {ski}


@pytest.mark.parametrize("prune", [True, False])
def test_prune_keeps_what_is_unknown(corpus, letters, processor, prune, monkeypatch, caplog, tmp_path):
    """Documents that are in no source are removed, except if a source that cannot be read may contain them."""
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 1)
    (letters / "letter.txt").write_bytes(b"\0\xff")
    (letters / "old" / "ski.md").write_text(" ")
    (letters / "new.txt").write_text("Ada wrote it.")
    (letters / "picture.png").write_bytes(b"\x89PNG")
    report = build_corpus([str(letters)], corpus, processor, prune=prune)
    assert (report.added, report.removed, report.unchanged, len(report.skipped)) == (1, int(prune), 0, 3)
    known = {"letters/letter.txt", "letters/new.txt"}
    assert corpus.documents() == (known if prune else known | {"letters/old/ski.md"}) and not caplog.text
    for path in letters.glob("*.txt"):
        path.unlink()
    with pytest.raises(ValueError, match="Found no document"):
        build_corpus([str(letters)], corpus, processor, prune=prune)
    (more := tmp_path / "more.txt").write_text("More.")
    (letters / "rows.jsonl").write_text("{")  # the ids of its rows are unknown
    assert build_corpus([str(letters), str(more)], corpus, processor, prune=prune).removed == 0
    assert corpus.documents() >= known | {"more.txt"}
    assert ("`prune` removed nothing, because 1 of the sources" in caplog.text) == prune


def test_broken_lines_lose_only_themselves(make_corpus, processor, tmp_path):
    """Line numbers identify rows: the row of a deleted line is removed, the row of a broken line stays."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(
        b'\xef\xbb\xbf{"text": "Ships sail."}\n\n{"text": "The password is hunter2."}\n{"text": "Oars."}\n'
    )
    corpus = make_corpus(rows)
    assert corpus.documents() == {f"rows.jsonl#{line}" for line in (1, 3, 4)}
    rows.write_text('{"text": "Ships sail."}\n\n\n{"text": "Oa\n\n')
    report = build_corpus([str(rows)], corpus, processor, prune=True)
    assert (report.removed, len(report.skipped)) == (1, 1) and "line 4 is not a JSON object" in report.skipped[0]
    assert corpus.documents() == {f"rows.jsonl#{line}" for line in (1, 4)}
    rows.write_text('{"text": "Ships sail.", "id": "a"}\n{"text": "Oa\n')  # the id in the broken line is unknown
    assert build_corpus([str(rows)], corpus, processor, prune=True).removed == 0


def test_unseen_characters_change_no_row(make_corpus, tmp_path):
    """Passages have the text that a reader sees, and its offsets in the file."""
    clean = "The office wrote it.\nAda read it aloud in Oslo. " * 3
    unclean = clean.replace("office", "o\ufb03ce").replace("wrote", "wro\u00adte").replace("aloud", "alo-\nud")
    made = []
    for number, text in enumerate((clean, unclean)):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "a.txt").write_text(text)
        made.append(rows_of(make_corpus(folder / "a.txt", name=f"corpus{number}", passage_tokens=40)).to_pylist())
    place_fields = ("start", "end", "document", "digest", "id")
    expected, unclean_rows = (
        [{k: v for k, v in row.items() if k not in place_fields} for row in rows] for rows in made
    )
    assert unclean_rows == expected and len(unclean_rows) > 1
    assert [readable(unclean[row["start"] : row["end"]]).text for row in made[1]] == [row["text"] for row in made[0]]


def test_more_text_suffixes_are_read(tmp_path):
    texts = {
        "a.rst": "One.",
        "b.tex": "Two.",
        "c.log": "Three.",
        "d.adoc": "Four.",
        "LICENSE": "Five.",
        "e.TXT": "Six.",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "program").write_bytes(b"\x7fELF" + bytes(99))
    (tmp_path / "e.cfg").write_text("no")
    skipped = []
    documents = read_documents([str(tmp_path)], lambda what, **known: skipped.append((what, known)), tmp_path)
    assert {document.id: document.text for document in documents} == texts
    assert len(skipped) == 2 and "e.cfg has the suffix .cfg; expected" in skipped[0][0]
    assert skipped[1][1] == {"id": "program"}


def test_word_limited_corpus_is_updated(corpus, letters, processor):
    """A corpus of version 0.2, with a limit in words, still opens, and the old argument works with a warning."""
    settings = {name: value for name, value in corpus.settings.items() if name != "passage_tokens"}
    metadata = {METADATA: json.dumps(settings | {"passage_words": 26}).encode()}
    old = corpus.path.parent / "old"
    lancedb.connect(old).create_table("passages", schema=corpus.table.schema.with_metadata(metadata))
    assert Corpus(old).settings == corpus.settings
    with pytest.warns(FutureWarning, match="pass `passage_tokens=36`"):
        assert build_corpus([str(letters)], Corpus.create(old, processor, passage_words=26), processor).added == 2
    assert rows_of(Corpus(old)).equals(rows_of(corpus))


def test_splits_have_their_own_ids(make_corpus, processor, monkeypatch):
    """Each split of a data set is read once, and the rows of two splits have different ids."""
    opened = []

    def load_dataset(path, name, split, streaming):
        opened.append(split)
        return [{"text": f"{split} {number}."} for number in range(2)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    corpus = make_corpus()
    sources = ["user/letters", "user/letters?split=test"]
    assert build_corpus(sources, corpus, processor, prune=True).added == 4 and opened == ["train", "test"]
    assert corpus.documents() == {f"{source}#{number}" for source in sources for number in (1, 2)}
    assert build_corpus(sources[:1], corpus, processor, prune=True).removed == 2


def test_file_has_one_id(letters, corpus, processor, monkeypatch):
    """A file has the same id for each path that leads to it."""
    monkeypatch.chdir(letters / "old")
    for source in ("..", "../../letters", str(letters)):
        assert build_corpus([source], corpus, processor).unchanged == 2
    assert corpus.documents() == {"letters/letter.txt", "letters/old/ski.md"}


def test_ids_may_have_any_characters(tmp_path, processor, make_corpus):
    ids = ["o'neil", "'); --", "%", "a\nb", "\u00e9\u202e", '"', "\\", "x#0", "x"]
    source = write_rows(tmp_path / "rows.jsonl", [{"id": id, "text": f"It is {id}."} for id in ids])
    corpus = make_corpus(source)
    assert build_corpus([str(source)], corpus, processor).unchanged == len(ids)
    for number, id in enumerate(ids, start=1):
        corpus.remove([id])
        assert len(corpus) == len(ids) - number


def test_every_source_kind_gives_documents(tmp_path):
    rows = [{"title": "A", "text": "One."}, {"text": "Two.", "id": 7}]
    write_rows(tmp_path / "a.jsonl.gz", rows)
    passages = [{"title": "B", "text": "Three."}, {"text": "Four \ud800."}]
    shared = [{"question": "?", "passages": passages}, {"passages": passages[:1]}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shared))  # a surrogate, escaped
    nowhere = pa.array([0, 0], pa.timestamp("s", tz="Nowhere"))  # a column that Python cannot read
    table = pa.table({"body": ["Five.", "Six."], "name": ["C", None], "when": nowhere})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "Who?.txt").write_text("Ada.")  # the question mark begins no option
    sources = ["a.jsonl.gz", "b.jsonl", "c.parquet?text=body&title=name", "Who?.txt"]
    documents = list(read_documents([str(tmp_path / source) for source in sources], skip=pytest.fail))
    assert [(document.title, document.text) for document in documents] == [
        ("A", "One."), ("", "Two."), ("B", "Three."), ("", "Four ?."), ("B", "Three."), ("C", "Five."), ("", "Six."),
        ("", "Ada."),
    ]  # fmt: skip
    assert documents[0].id == f"{tmp_path}/a.jsonl.gz#1" and documents[1].id == "7"
    assert documents[2] == documents[4]


def test_unreadable_sources_are_listed(tmp_path, processor):
    rows = [{"text": None}, *[{"id": "a", "text": "One."}] * 3, {"id": "a", "text": "Two."}]
    rows.append({"id": "b", "title": "T" * 1001, "text": "One."})
    cases = {
        ".git/hidden.txt": (b"Hidden.",),
        "binary.txt": (
            b"\0\1\2 \xff",
            "binary.txt is not text in UTF-8 or in any other known encoding (the first byte that does not fit is at "
            "offset 0)",
        ),
        "blank.md": (b" \n", "blank.md contains no text"),
        "broken.jsonl.gz": (b"no gzip", "broken.jsonl.gz cannot be read"),
        "broken.parquet": (b"PAR1", "broken.parquet cannot be read"),
        "deep.jsonl": (b"[" * 10**5, "deep.jsonl, line 1 is not a JSON object"),
        "good.txt": (b"Good.",),
        "picture.png": (b"\x89PNG", "picture.png has the suffix .png; expected"),
        "rows.jsonl": (
            "".join(json.dumps(row) + "\n" for row in rows).encode() + b'{\n{"text": "Last."}',
            "rows.jsonl#1 has neither a string in `text`",
            "a is the id of an earlier document with another text. Give each document its own id",
            "b has a title of 1001 characters; expected at most 1000",
            "line 7 is not a JSON object",
        ),
        "torn.jsonl.gz": (gzip.compress(b"{}")[:10] + b"\xff" * 20, "torn.jsonl.gz cannot be read"),
    }
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    for name, (content, *_) in cases.items():
        (folder / name).write_bytes(content)
    corpus = Corpus.create(folder / "corpus", processor)  # in the folder of its texts, but not one of them
    report = build_corpus([str(folder)], corpus, processor)
    messages = [message for _, *more in cases.values() for message in more]
    assert all(part in reason for part, reason in zip(messages, report.skipped, strict=True))
    assert (report.added, report.unchanged, len(corpus)) == (3, 2, 3)


def test_sources_without_documents_are_refused(tmp_path, make_corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for source, error, message in (
        ("empty", ValueError, "Found no document with text in empty .empty contains no files"),
        (" ", ValueError, "One of the sources is empty"),  # not this folder
        *((name, FileNotFoundError, "There is no file or folder") for name in ("none", "none.txt", "empty/none")),
    ):
        with pytest.raises(error, match=message):
            make_corpus(source)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"passage_tokens": 37}, {}, "`passage_tokens` 36, .* asks for 37"),
        ({"tokens_per_slot": 4}, {}, "`tokens_per_slot` 'segment', .* asks for 4"),
        ({}, {"sentences_per_segment": 2}, "`sentences_per_segment` 1, .* asks for 2"),
        ({}, {"spacy_model": "de"}, "`spacy_model` 'en', .* asks for 'de'"),
        ({}, {"context_words": True}, "`context_words` False, .* asks for True"),
        ({}, {"encoder_dtype": "bfloat16"}, "`encoder_dtype` 'float32', .* asks for 'bfloat16'"),
    ],
)
def test_other_settings_are_refused(options, settings, message, corpus, base_model_dir, encoder_dir):
    with pytest.raises(ValueError, match=message):
        Corpus.create(corpus.path, new_processor(base_model_dir, encoder_dir, **settings), **options)


def test_corpus_of_another_encoder(corpus, processor, monkeypatch):
    """A corpus of another encoder is refused; one of the same encoder under another name is not."""
    monkeypatch.setattr(processor, "encoder_name_or_path", "another/name")
    corpus.check(processor)
    encode = processor.encoder.encode_spans
    monkeypatch.setattr(processor.encoder, "encode_spans", lambda *texts: encode(*texts).roll(1, dims=1))
    with pytest.raises(ValueError, match="but the checkpoint has 'another/name'.*build another corpus"):
        corpus.check(processor)
    monkeypatch.setattr(processor, "encoder_name_or_path", corpus.settings["encoder"])
    with pytest.raises(ValueError, match="an encoder of this name with other weights"):
        corpus.check(processor)


def test_further_trained_encoder_warns(corpus, processor, monkeypatch):
    """Slots of slightly older encoder weights are used, with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus.check(processor)
    encode = processor.encoder.encode_spans

    def moved(*texts):
        vectors = encode(*texts)
        return torch.nn.functional.normalize(vectors + 0.03 * vectors.roll(1, dims=1), dim=-1)

    monkeypatch.setattr(processor.encoder, "encode_spans", moved)
    with pytest.warns(
        UserWarning, match="weights differ slightly from those of the checkpoint's encoder.* build the corpus again"
    ):
        corpus.check(processor)


def test_invalid_corpus_and_second_writer(corpus, make_corpus, processor, letters, tmp_path):
    """A folder that is not a corpus, and a second writer, are refused."""
    with pytest.raises(FileNotFoundError, match="There is no corpus"):
        Corpus(tmp_path / "none")
    (tmp_path / "half" / "passages.lance" / "data").mkdir(parents=True)
    schema = corpus.table.schema.with_metadata({METADATA: b"{}"})
    lancedb.connect(tmp_path / "odd").create_table("passages", schema=schema)
    schema = corpus.table.schema.with_metadata({METADATA: b'{"format": 1}'})
    lancedb.connect(tmp_path / "old").create_table("passages", schema=schema)
    with pytest.raises(
        ValueError, match="has format 1; this version of ArcAligner needs format 2. Delete the folder, and build"
    ):
        Corpus(tmp_path / "old")
    for folder in (letters, tmp_path, tmp_path / "half", tmp_path / "odd"):
        with pytest.raises(ValueError, match="is not a corpus of ArcAligner, or is damaged: .* build the corpus again"):
            Corpus.create(folder, processor)
    with corpus.writing(), pytest.raises(ValueError, match="Another process is writing"):
        make_corpus(letters)
    with pytest.raises(ValueError, match="`passage_tokens` is 0"):
        make_corpus(passage_tokens=0)


def test_full_disk_and_broken_file(corpus, letters, processor, monkeypatch):
    """A full disk and a broken file end in a clear error."""
    (letters / "new.txt").write_text("New.")
    before = rows_of(corpus)
    full = Mock(side_effect=RuntimeError("lance error: LanceError(IO): No space left on device"))
    monkeypatch.setattr(corpus.table, "add", full)
    with pytest.raises(OSError, match="Writing to the corpus .* failed: .*No space left on device"):
        build_corpus([str(letters)], corpus, processor)
    assert rows_of(Corpus(corpus.path)).equals(before)
    for file in (corpus.path / "passages.lance" / "data").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(OSError, match="cannot be read: .*build the corpus again"):
        Corpus(corpus.path).info()
