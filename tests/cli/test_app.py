"""The command line answers from files, says what it did, and ends mistakes in one clear line."""

import functools
import io
import re
import shutil
import threading
import time
import types
from importlib import metadata
from pathlib import Path

import pytest
from conftest import edit_json
from rich.console import Console
from tiny_models import random_probe

from arcaligner import ArcAlignerPipeline
from arcaligner.cli import app as cli
from arcaligner.cli import demo, shared
from arcaligner.common.files import counted, exit_on_user_error, printable, read_json_lines
from arcaligner.train import stages

CASES = list(read_json_lines(demo.CASE_STUDIES))
QUESTION = "Who wrote it?"
TEXT = "It was written by [Ada].  Nobody else knew.\n"
STEPS = ["Loading the aligner and its base model", "Reading 2 passages"]


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "letter.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


cli_load_pipeline = shared.load_pipeline
load_pipeline = functools.cache(shared.load_pipeline)


@pytest.fixture(autouse=True)
def wide_terminal_and_models_loaded_once(monkeypatch):
    monkeypatch.setattr(shared, "load_pipeline", load_pipeline)
    monkeypatch.setenv("COLUMNS", "160")
    for console in (shared.output, shared.messages):  # made when the module was imported
        monkeypatch.setattr(console, "width", 160)


def test_answer_prints_the_pipelines_answer_and_nothing_else(run_cli, checkpoint_dir, document, model, processor):
    ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
    record = ask({"question": QUESTION, "documents": [TEXT, TEXT]}, return_slots=True)[0]
    options = ("--document", document, "--document", document, "--checkpoint", checkpoint_dir)
    code, out, err = run_cli("answer", "--question", QUESTION, *options)
    assert code == 0
    assert out == printable(record["generated_text"].strip()) + "\n"
    *steps, check, summary = err.splitlines()
    assert steps == [*STEPS, f"{document}:0-{len(TEXT)}", f"{document}:0-{len(TEXT)}"]  # both were read
    assert check == "The answer is not word for word in what was read: check it."
    assert summary.startswith(f"{record['statistics']['tokens']} tokens of text read as 4 slots")


@pytest.mark.parametrize("command", ["corpus build x --output y", "evaluate", "answer --question Q --document x"])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_checkpoint_that_is_nowhere_is_asked_for_once(run_cli, monkeypatch, tmp_path, command, is_silent):
    asked = []

    def model_info(name, **settings):
        asked.append(name)
        gone.wait(30) if is_silent else None
        raise ConnectionError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("Text.")
    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    monkeypatch.setattr(shared, "load_pipeline", cli_load_pipeline)
    began, gone = time.monotonic(), threading.Event()
    code, _, err = run_cli(*command.split(), "--checkpoint", "nowhere/x")
    assert code == 1 and "There is no aligner at nowhere/x: neither a checkpoint folder" in err.replace("\n", " ")
    assert asked == ["nowhere/x"] and time.monotonic() - began < 2 + shared.HUB_SECONDS
    gone.set()


def test_show_slots_lists_each_sentence_with_its_place(run_cli, checkpoint_dir, document):
    options = ("--document", document, "--checkpoint", checkpoint_dir, "--show-slots")
    code, out, _ = run_cli("answer", "--question", QUESTION, *options)
    assert code == 0
    lines = out.splitlines()
    for sentence in ("It was written by [Ada].", "Nobody else knew."):
        start = TEXT.index(sentence)
        (line,) = [line for line in lines if sentence in line]
        assert f" {start}-{start + len(sentence)} " in line
        assert " passes" in line


def test_options_of_answer_reach_the_pipeline(run_cli, monkeypatch, document):
    asked = []
    record = {"generated_text": "Ada", "segments": [{"document": 0}]}
    record["statistics"] = {"tokens": 14, "slots": 1, "compression_rate": 14.0}

    class Ask:
        processor = types.SimpleNamespace(answer_probe=None, spacy_model="en", no_answer=None)

        def __call__(self, row, **settings):
            asked.append((row, settings))
            return [record]

    monkeypatch.setattr(shared, "load_pipeline", {"here": Ask()}.get)
    given = ("answer", "--question", QUESTION, "--document", document, "--checkpoint", "here", "--max-new-tokens", 3)
    options = ("--gate-mode", "always", "--tokens-per-slot")
    for rate in ("segment", 3):
        code, out, err = run_cli(*given, *options, rate)
        assert (code, out) == (0, "Ada\n")
        assert err.splitlines()[-1] == "14 tokens of text read as 1 slot, x14.0"
        settings = {"return_slots": True, "max_new_tokens": 3, "gate_mode": "always"}
        row = {"question": QUESTION, "documents": [{"title": "", "text": TEXT}]}
        assert asked.pop() == (row, settings | {"tokens_per_slot": rate})
    for name, value in (("--tokens-per-slot", "many"), ("--gate-mode", "never"), ("--max-new-tokens", 0)):
        code, _, err = run_cli(*given, name, value)
        assert code == 2 and name in err and not asked


@pytest.fixture
def chooser(checkpoint_dir, monkeypatch):
    """The pipeline of an aligner that can tell which passage answers."""
    ask = shared.load_pipeline(str(checkpoint_dir))
    for owner in (ask.processor, ask.model.config):
        monkeypatch.setattr(owner, "passage_attention", "separate")
    monkeypatch.setattr(ask.processor, "answer_probe", random_probe(ask.model))
    return ask


LONG = "One two three four five six seven eight nine ten. "


@pytest.mark.parametrize("number", [1, 2])
def test_a_long_file_is_cut_and_the_likeliest_passages_are_read_and_named(
    run_cli, chooser, checkpoint_dir, tmp_path, number
):
    path = tmp_path / "long.md"
    path.write_text(f"# Numbers\n\n{20 * LONG}\n\n## Letters\n\n{25 * LONG}", encoding="utf-8")
    given = ("answer", "--question", QUESTION, "--document", path, "--checkpoint", checkpoint_dir)
    code, out, err = run_cli(*given, *(() if number == 1 else ("--max-passages", number)))  # one is the default
    passages, documents = cli.cut([cli.read_document(path)], "en")
    assert [each.title for each in passages] == ["Numbers"] * 2 + ["Numbers › Letters"] * 3
    record = chooser({"question": QUESTION, "documents": documents}, return_slots=True, max_passages=number)[0]
    read = sorted({each["document"] for each in record["segments"]})
    assert code == 0 and out == printable(record["generated_text"].strip()) + "\n" and len(read) == number
    told = [line for line in err.splitlines() if line.startswith(str(path))]
    spans = [(passages[place].start, passages[place].end, passages[place].title) for place in read]
    assert told == [f"{path}:{start}-{end} {title}" for start, end, title in spans]
    assert f"{counted(5 - number, 'passage')} not read: less likely to answer (--max-passages)" in err
    start, end, _ = spans[0]
    assert path.read_text("utf-8")[start:end] == documents[read[0]]["text"]


def test_of_several_files_the_likeliest_is_read_or_as_many_as_are_asked_for(
    run_cli, chooser, checkpoint_dir, document, tmp_path
):
    (other := tmp_path / "other.txt").write_text("The ship left on Monday.", encoding="utf-8")
    given = ("answer", "--question", QUESTION, "--document", document, "--document", other)
    code, out, err = run_cli(*given, "--checkpoint", checkpoint_dir, "--show-slots", "--max-passages", 2)
    assert code == 0 and "It was written by" in out and "The ship left" in out and "less likely" not in err
    assert "letter.txt" in out and "other.txt" in out  # of each slot
    code, out, err = run_cli(*given, "--checkpoint", checkpoint_dir)
    assert code == 0 and "1 passage not read: less likely" in err


def test_the_version_is_that_of_the_package(run_cli):
    assert run_cli("--version") == (0, f"arcaligner {metadata.version('arcaligner')}\n", "")


def test_a_file_for_a_corpus_is_not_answered_from(run_cli, checkpoint_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "MANY_PASSAGES", 4)
    path = tmp_path / "long.txt"
    path.write_text("One two three four five six seven eight nine ten. " * 41, encoding="utf-8")
    checkpoint = ("--checkpoint", checkpoint_dir)
    code, _, err = run_cli("answer", "--question", QUESTION, "--document", path, *checkpoint)
    assert code == 1 and "long.txt is cut into 5 passages" in err and "corpus build" in err.replace("\n", " ")
    path.write_text("x" * 16 * 401)  # text without spaces is cut as well
    assert "cut into 5 passages" in run_cli("answer", "--question", QUESTION, "--document", path, *checkpoint)[2]


def test_mistakes_end_in_one_clear_line(run_cli, checkpoint_dir, base_model_dir, document, tmp_path):
    binary, empty = tmp_path / "binary.txt", tmp_path / "empty.txt"
    binary.write_bytes(b"\0\1\2 \xff")
    empty.write_text(" \n")
    for question, path, checkpoint, message in (
        (QUESTION, binary, checkpoint_dir, "binary.txt is not UTF-8 text, nor in another encoding (byte 0)"),
        (QUESTION, empty, checkpoint_dir, "empty.txt holds no text"),
        (QUESTION, Path("tests/data/case_studies.jsonl").absolute(), checkpoint_dir, "case_studies.jsonl holds rows"),
        (" ", document, checkpoint_dir, "The question is empty"),
        (QUESTION, document, tmp_path / "none", f"There is no folder {tmp_path / 'none'}"),
        (QUESTION, document, "tests/none", "There is no folder tests/none"),
        (QUESTION, document, "", "`--checkpoint` is empty"),
        (QUESTION, document, "nobody/none", "There is no aligner at nobody/none"),
        (QUESTION, document, base_model_dir, "of type 'llama'; expected 'arcaligner'"),
    ):
        options = ("--question", question, "--document", path, "--checkpoint", checkpoint)
        code, out, err = run_cli("answer", *options)
        assert code == 1 and out == ""
        assert err.splitlines()[-1].startswith("Error: ") and message in err.splitlines()[-1]
        assert "Traceback" not in err


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("ARCALIGNER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="^a mistake$"), exit_on_user_error():
        raise ValueError("a mistake")


def cut_in_half(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", cut_in_half, "model.safetensors cannot be read"),
        ("config.json", lambda path: path.write_text("[]"), "config.json is not a configuration"),
        ("config.json", cut_in_half, "config.json' is not a valid JSON file"),
        ("config.json", lambda path: edit_json(path, lora_r="x"), "Field 'lora_r' expected int, got str"),
        ("config.json", lambda path: edit_json(path, text_config=5), "The config.json of "),
        ("config.json", lambda path: edit_json(path, base_model_name_or_path="a/b"), "`hf download a/b --local-dir"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "tokenizer.json is not an object with `model`"),
        ("tokenizer.json", cut_in_half, "tokenizer.json is not JSON"),
        ("tokenizer_config.json", lambda path: path.write_text("[]"), "tokenizer_config.json is not an object"),
        ("processor_config.json", lambda path: path.unlink(), "has no processor_config.json"),
        ("processor_config.json", lambda path: path.write_text("{}"), "processor_config.json is not an object"),
        ("processor_config.json", lambda path: edit_json(path, spacy_model=5), "`spacy_model` is 5"),
        ("generation_config.json", cut_in_half, "generation_config.json is not JSON"),
        ("chat_template.jinja", lambda path: path.write_text("{%"), "The chat template (chat_template.jinja) cannot"),
    ],
)
def test_a_broken_file_is_named_in_one_line(run_cli, checkpoint_dir, document, tmp_path, name, damage, message):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint_dir, broken)
    edit_json(broken / "config.json", digests=None)  # as of an older one, of which each file is looked at by itself
    damage(broken / name)
    code, out, err = run_cli("answer", "--question", QUESTION, "--document", document, "--checkpoint", broken)
    assert code == 1 and out == ""
    first, *more = [line for line in err.splitlines() if not line.startswith(("Loading", "Reading"))]
    assert first.startswith("Error: ") and message in "".join([first, *more])
    assert len(more) == ("hf download" in message)  # how to get it is a line of its own


STEERING = "\x1b]0;title\x07 \x1b[2J \x9b1m \u202e \x7f"
SHOWN = r"\x1b]0;title\x07 \x1b[2J \x9b1m \u202e \x7f"


def test_a_terminal_is_not_steered_by_documents_answers_and_mistakes(run_cli, monkeypatch, checkpoint_dir, document):
    document.write_text(f"It was {STEERING} written.", encoding="utf-8")
    options = ("--document", document, "--checkpoint", checkpoint_dir)
    ask = shared.load_pipeline(str(checkpoint_dir))
    records = ask({"question": QUESTION, "documents": [TEXT]}, return_slots=True)
    monkeypatch.setattr(type(ask), "__call__", lambda *arguments, **kwargs: [records[0] | {"generated_text": STEERING}])
    code, out, _ = run_cli("answer", "--question", QUESTION, *options)
    assert (code, out) == (0, f"{SHOWN}\n")
    monkeypatch.undo()
    monkeypatch.setattr(cli, "output", Console(width=160))  # a table would break lines where the escapes are
    code, out, _ = run_cli("answer", "--question", f"Who {STEERING}?", *options, "--show-slots")
    assert code == 0 and SHOWN in out
    code, _, err = run_cli("answer", "--question", QUESTION, *options[:-1], f"nobody/{STEERING}")
    assert code == 1 and SHOWN in err
    assert not {*STEERING} & {*out, *err} - {*"0;title 21mJ[]"}
    row = CASES[0] | {"question": STEERING}
    record = {"generated_text": STEERING, "statistics": {}}
    cells = demo.answer_cells(row | {"answers": [f"{STEERING} zebra"]}, record)
    assert not {"\x1b", "\x07"} & {*"".join(cells)} and "gold" in cells[1]


@pytest.fixture
def untrained(monkeypatch) -> list:
    """Stages and launcher that would have run."""
    asked = []
    monkeypatch.setattr(stages, "run_stages", lambda *arguments: asked.append(arguments))
    return asked


def test_train_runs_the_stages_of_a_recipe(run_cli, untrained):
    code, out, err = run_cli("train", "--recipe", "tiny", "--output", "mine", "--", "--seed", "2", "--max_steps=3")
    assert (code, out, err) == (0, "", "")
    folder = stages.RECIPES / "tiny"
    assert untrained == [(stages.read_stages(folder, "mine", ["--seed", "2", "--max_steps=3"]), None)]
    code, _, _ = run_cli("train", "--recipe", folder, "--stage", "2", "--accelerate", "cpu")
    assert code == 0 and untrained[1] == (stages.read_stages(folder, only=2), "cpu")


def test_mistakes_in_train_end_in_one_clear_line(run_cli, monkeypatch):
    monkeypatch.setattr(stages, "run_to_end", lambda command: 1)
    for options, message in (
        (("--recipe", "none"), "There is no recipe 'none'"),
        (("--recipe", "tiny", "--", "--output_dir", "x"), "Name a folder for all stages with `--output`"),
        (("--recipe", "tiny", "--accelerate", "none"), "no accelerate config 'none'"),
        (("--recipe", "tiny", "--output", "none"), "1_reconstruction failed with exit code 1; see the message above"),
    ):
        code, out, err = run_cli("train", *options)
        assert code == 1 and out == ""
        assert err.startswith("Error: ") and message in err and err.count("\n") == 1
    assert run_cli("train")[0] == run_cli("train", "--recipe", "tiny", "--stage", "4")[0] == 2


@pytest.fixture
def ask(checkpoint_dir, monkeypatch) -> ArcAlignerPipeline:
    """The aligner of the demo, with room for twenty passages in as many tokens as a tiny tokenizer makes of them."""
    ask = shared.load_pipeline(str(checkpoint_dir))
    monkeypatch.setattr(ask.model.config.text_config, "max_position_embeddings", 2**15)
    return ask


def shown_demo(ask) -> str:
    demo.run_demo(ask, console := Console(file=io.StringIO(), width=400))
    return " ".join(console.file.getvalue().split())


def test_demo_shows_every_question_with_its_answer(ask, monkeypatch):
    monkeypatch.setattr(demo, "contains_match", lambda answer, golds: float(golds == CASES[0]["answers"]))
    shown, asked = shown_demo(ask), demo.demo_questions()
    many, cases = (each.rows for each in asked)
    assert cases == CASES and [len(row["passages"]) for row in many] == [20] * 10
    assert all(row["passages"] == many[0]["passages"] for row in many)
    for row in many + cases:
        assert row["question"] in shown
        assert (f"gold: {row['answers'][0]}" in shown) == (row != CASES[0])  # where the answer is right, it says enough
    assert "1 of 13 answers contain a gold answer" in shown


def test_an_aligner_that_can_refuse_is_also_asked_what_its_passages_do_not_answer(ask, monkeypatch):
    for owner in (ask.processor, ask.model.config):
        monkeypatch.setattr(owner, "passage_attention", "separate")
    monkeypatch.setattr(ask.processor, "no_answer", "unanswerable")
    monkeypatch.setattr(ask.processor, "answer_probe", random_probe(ask.model, threshold=1.0))
    shown = shown_demo(ask)
    many, refused, _ = (each.rows for each in demo.demo_questions("unanswerable"))
    assert refused[0]["question"] == many[0]["question"] and refused[0]["answers"] == ["unanswerable"]
    texts = [each["text"] for each in refused[0]["passages"]]
    assert len(texts) == 4 and not any(gold in text for gold in many[0]["answers"] for text in texts)
    assert len(re.findall(r" [01]\.\d\d ", shown)) == 14 and "1 of 14 answers" in shown
    assert shown.count("unanswerable") == 14


def test_a_row_of_the_demo_is_green_where_it_is_right_and_has_the_gold_answer_where_not():
    record = {"generated_text": " Canada", "statistics": {"confidence": 0.5}}
    assert demo.answer_cells(CASES[0], record) == [CASES[0]["question"], "[green]Canada[/]", "0.50"]
    wrong = demo.answer_cells(CASES[0], {"generated_text": "[red]", "statistics": {}})
    assert wrong[1:] == ["[yellow]\\[red][/]\n[dim]gold: Canada[/]", ""]
