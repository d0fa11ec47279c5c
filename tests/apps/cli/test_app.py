"""The command line answers from files, reports what it did, and reports a mistake in one clear line."""

import functools
import io
import shutil
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import edit_json, pipeline_of
from rich.console import Console

from arcaligner import ArcAlignerPipeline
from arcaligner.apps.cli import app as cli
from arcaligner.apps.cli import demo, shared
from arcaligner.common.files import counted, exit_on_user_error, printable, read_json_lines
from arcaligner.train import stages

CASES = list(read_json_lines(demo.CASE_STUDIES))
QUESTION = "Who wrote it?"
TEXT = "It was written by [Ada].  Nobody else knew.\n"

cli_load_pipeline = shared.load_pipeline
load_pipeline = functools.cache(shared.load_pipeline)


@pytest.fixture(autouse=True)
def wide_terminal_and_models_loaded_once(monkeypatch):
    monkeypatch.setattr(shared, "load_pipeline", load_pipeline)
    monkeypatch.setenv("COLUMNS", "160")
    for console in (shared.output, shared.messages):  # both exist since the import
        monkeypatch.setattr(console, "width", 160)


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "letter.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def answer(run_cli, checkpoint_dir):
    """Runs `answer` on files; returns exit code, output and errors."""

    def run(*documents, question=QUESTION, checkpoint=checkpoint_dir, options=()):
        arguments = [part for document in documents for part in ("--document", document)]
        return run_cli("answer", question, *arguments, "--checkpoint", checkpoint, *options)

    return run


@pytest.fixture
def chooser(checkpoint_dir, monkeypatch, give_head):
    """The pipeline of an aligner that ranks passages and can abstain, with a context of 32,768 positions."""
    ask = shared.load_pipeline(str(checkpoint_dir), None, None)
    for owner in (ask.processor, ask.model.config):
        monkeypatch.setattr(owner, "passage_attention", "separate")
    give_head(ask.model)
    monkeypatch.setattr(ask.model.config, "answerability_threshold", 1.0)
    monkeypatch.setattr(ask.processor, "no_answer", "unanswerable")
    monkeypatch.setattr(ask.model.config.text_config, "max_position_embeddings", 2**15)
    return ask


def test_answer_prints_pipeline_answer_only(answer, document, model, processor):
    record = pipeline_of(model, processor)({"question": QUESTION, "documents": [TEXT, TEXT]}, return_slots=True)[0]
    code, out, err = answer(document, document)
    assert (code, out) == (0, printable(record["generated_text"].strip()) + "\n")
    place = f"{document}:0-{len(TEXT)}"  # both were read
    *steps, check, summary = err.splitlines()
    assert steps == ["Loading the aligner and its base model", "Encoding 2 passages and answering", place, place]
    assert check == "The answer does not appear word for word in the passages; please check it."
    assert summary.startswith(f"{record['statistics']['tokens']} tokens of text compressed to 4 slots (")


def test_show_slots_lists_sentences(answer, document, tmp_path):
    """`--show-slots` lists each sentence with its file and place."""
    (other := tmp_path / "other.txt").write_text("The ship left on Monday.", encoding="utf-8")
    code, out, _ = answer(document, other, options=["--show-slots"])
    assert code == 0
    for name, sentence in (("letter.txt", "It was written by [Ada]."), ("other.txt", "The ship left on Monday.")):
        (line,) = [line for line in out.splitlines() if sentence in line]
        assert name in line and f" 0-{len(sentence)} " in line and " passes" in line
    assert f" {TEXT.index('Nobody')}-{len(TEXT) - 1} " in out


@pytest.mark.parametrize("tokens_per_slot", ["segment", 3])
def test_answer_options_reach_pipeline(answer, monkeypatch, document, tokens_per_slot):
    calls, ask = [], ArcAlignerPipeline.__call__
    monkeypatch.setattr(
        ArcAlignerPipeline, "__call__", lambda *args, **kwargs: calls.append(kwargs) or ask(*args, **kwargs)
    )
    options = ["--max-new-tokens", 3, "--gate-mode", "always", "--tokens-per-slot", tokens_per_slot, "--max-slots", 2]
    assert answer(document, options=options)[0] == 0
    settings = {"return_slots": True, "max_new_tokens": 3, "gate_mode": "always", "max_slots": 2}
    assert calls == [settings | {"tokens_per_slot": tokens_per_slot}]
    for name, value in (("--tokens-per-slot", "many"), ("--gate-mode", "never"), ("--max-new-tokens", 0)):
        code, _, err = answer(document, options=[name, value])
        assert code == 2 and name in err and len(calls) == 1


def test_zoom_reaches_pipeline(answer, monkeypatch, document):
    calls = []
    record = {"generated_text": "Ada", "segments": [], "statistics": {"tokens": 4, "slots": 2, "compression_rate": 2.0}}
    monkeypatch.setattr(ArcAlignerPipeline, "__call__", lambda *args, **kwargs: calls.append(kwargs) or [record])
    assert answer(document, options=["--zoom", 0.7])[0] == 0
    assert calls == [{"return_slots": True, "max_new_tokens": 256, "zoom": 0.7}]


def test_question_is_given_once(run_cli, document):
    """A missing question is refused, and so are two questions, one as an argument and one as an option."""
    for arguments, got in (((), "no question"), (("Who?", "--question", "Who?"), "two questions")):
        code, _, err = run_cli("answer", *arguments, "--document", document)
        assert code == 2 and f"Got {got}; expected one" in err


LONG = "One two three four five six seven eight nine ten. "


@pytest.mark.parametrize("number", [1, 2])
def test_long_file_is_cut(answer, chooser, tmp_path, number):
    """A long file is cut, and the passages that are used are listed."""
    (path := tmp_path / "long.md").write_text(f"# Numbers\n\n{12 * LONG}\n\n## Letters\n\n{15 * LONG}")
    code, out, err = answer(path, options=[] if number == 1 else ["--max-passages", number])  # one is the default
    passages, documents = cli.cut([cli.read_document(path)], chooser.processor)
    assert [passage.title for passage in passages] == ["Numbers"] * 2 + ["Numbers › Letters"] * 3
    record = chooser({"question": QUESTION, "documents": documents}, return_slots=True, max_passages=number)[0]
    used = sorted({segment["document"] for segment in record["segments"]})
    assert code == 0 and out == printable(record["generated_text"].strip()) + "\n" and len(used) == number
    lines = [line for line in err.splitlines() if line.startswith(str(path))]
    spans = [(passages[place].start, passages[place].end, passages[place].title) for place in used]
    assert lines == [f"{path}:{start}-{end} {title}" for start, end, title in spans]
    unused = f"Not used: {counted(5 - number, 'passage')}. To use more, pass a higher `--max-passages`."
    assert unused in " ".join(err.split())
    assert path.read_text("utf-8")[slice(*spans[0][:2])] == documents[used[0]]["text"]


def test_version_equals_package_version(run_cli):
    assert run_cli("--version") == (0, f"arcaligner {metadata.version('arcaligner')}\n", "")


# Mistakes


@pytest.mark.parametrize("command", ["evaluate", "answer --question Q --document x"])
def test_missing_checkpoint_fails_fast(run_cli, monkeypatch, tmp_path, command):
    """A checkpoint that does not exist is looked up once, with a short time limit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("Text.")
    monkeypatch.setattr("huggingface_hub.model_info", model_info := Mock(side_effect=ConnectionError))
    monkeypatch.setattr(shared, "load_pipeline", cli_load_pipeline)
    code, _, err = run_cli(*command.split(), "--checkpoint", "nowhere/x")
    assert code == 1 and "nowhere/x is neither a folder on this machine nor a repository" in err.replace("\n", " ")
    model_info.assert_called_once_with("nowhere/x", timeout=shared.HUB_SECONDS)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_missing_device_is_refused(run_cli, document, checkpoint_dir, monkeypatch, device):
    """A device that does not exist is refused in one line."""
    monkeypatch.setattr(shared, "load_pipeline", cli_load_pipeline)
    options = ("--checkpoint", checkpoint_dir, "--device", device)
    code, _, err = run_cli("answer", QUESTION, "--document", document, *options)
    assert code == 1 and err.splitlines()[-1].startswith(f"Error: `--device` is '{device}', but this machine has no")


def test_dropped_slots_are_reported(answer, document):
    """Slots that `--max-slots` drops are counted."""
    code, _, err = answer(document, options=["--max-slots", 1])
    assert code == 0 and "dropped because of `--max-slots`" in " ".join(err.split())


def test_judge_needs_an_endpoint(run_cli):
    """A judge without an address is refused before any question is loaded."""
    code, _, err = run_cli("reproduce", "table1", "--judge", "a/judge")
    assert code == 1 and "no address of a server with this model was given" in err


def test_user_errors_print_one_line(answer, base_model_dir, document, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "MANY_PASSAGES", 4)
    texts = {"binary": b"\0\1\2 \xff", "empty": b" \n", "long": 25 * LONG.encode(), "one_word": b"x" * (4 * 256 + 1)}
    paths = {name: tmp_path / f"{name}.txt" for name in texts}
    for name, path in paths.items():
        path.write_bytes(texts[name])
    for path, arguments, message in (
        (
            paths["binary"],
            {},
            "binary.txt is not text in UTF-8 or in any other known encoding (the first byte that does not fit is at "
            "offset 0)",
        ),
        (paths["empty"], {}, "empty.txt contains no text"),
        (paths["long"], {}, "long.txt has 5 passages; expected at most 4"),
        (paths["one_word"], {}, "one_word.txt has 5 passages"),  # text without spaces is cut as well
        (Path("tests/data/case_studies.jsonl").absolute(), {}, "case_studies.jsonl contains rows of data"),
        (document, {"question": " "}, "The question is empty"),
        (document, {"checkpoint": tmp_path / "none"}, f"There is no folder {tmp_path / 'none'}"),
        (document, {"checkpoint": "tests/none"}, "There is no folder tests/none"),
        (document, {"checkpoint": ""}, "The checkpoint is empty"),
        (document, {"checkpoint": base_model_dir}, "of type 'llama'; expected 'arcaligner'"),
        (document, {"options": ["--base-model", document]}, "`--base-model` works with `--engine llama.cpp`"),
        (document, {"options": ["--engine", "llama.cpp", "--show-slots"]}, "llama.cpp does not support `--show-slots`"),
    ):
        code, out, err = answer(path, **arguments)
        assert code == 1 and out == ""
        assert err.splitlines()[-1].startswith("Error: ") and message in err.splitlines()[-1]
        assert "Traceback" not in err


def test_traceback_on_request(monkeypatch):
    """A traceback is shown if the environment variable requests it."""
    monkeypatch.setenv("ARCALIGNER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="^a mistake$"), exit_on_user_error():
        raise ValueError("a mistake")


def cut_in_half(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", cut_in_half, "model.safetensors cannot be read"),
        ("config.json", lambda path: path.write_text("[]"), "does not contain a JSON object, so it is not a"),
        ("config.json", lambda path: edit_json(path, lora_r="x"), "Field 'lora_r' expected int, got str"),
        ("config.json", lambda path: edit_json(path, text_config=5), "The config.json of "),
        ("config.json", lambda path: edit_json(path, base_model_name_or_path="a/b"), "`hf download a/b --local-dir"),
        (
            "tokenizer.json",
            lambda path: path.write_text("{}"),
            "tokenizer.json does not contain a JSON object with the key `model`",
        ),
        ("tokenizer.json", cut_in_half, "tokenizer.json is not JSON"),
        (
            "tokenizer_config.json",
            lambda path: path.write_text("[]"),
            "tokenizer_config.json does not contain a JSON object",
        ),
        ("processor_config.json", lambda path: path.unlink(), "has no processor_config.json"),
        (
            "processor_config.json",
            lambda path: path.write_text("{}"),
            "processor_config.json does not contain a JSON object",
        ),
        ("processor_config.json", lambda path: edit_json(path, spacy_model=5), "`spacy_model` is 5"),
        ("generation_config.json", cut_in_half, "generation_config.json is not JSON"),
        ("chat_template.jinja", lambda path: path.write_text("{%"), "The chat template cannot be used"),
    ],
)
def test_broken_file_prints_one_line(answer, checkpoint_dir, document, tmp_path, name, damage, message):
    broken = shutil.copytree(checkpoint_dir, tmp_path / "broken")
    edit_json(broken / "config.json", digests=None)  # like an older checkpoint: each file is checked alone
    damage(broken / name)
    code, out, err = answer(document, checkpoint=broken)
    assert code == 1 and out == ""
    first, *more = [line for line in err.splitlines() if not line.startswith(("Loading", "Reading", "Encoding"))]
    assert first.startswith("Error: ") and message in "".join([first, *more])
    assert len(more) == ("hf download" in message)  # the remedy is on a second line


STEERING = "\x1b]0;title\x07 \x1b[2J \x9b1m \u202e \x7f"
STATISTICS = {"tokens": 9, "slots": 1, "compression_rate": 9.0}
SHOWN = r"\x1b]0;title\x07 \x1b[2J \x9b1m \u202e \x7f"


def test_control_characters_are_escaped(answer, monkeypatch, document):
    """Documents, answers and errors cannot control a terminal."""
    document.write_text(f"It was {STEERING} written.", encoding="utf-8")
    record = {"generated_text": STEERING, "segments": [], "statistics": STATISTICS}
    with monkeypatch.context() as patch:
        patch.setattr(ArcAlignerPipeline, "__call__", lambda *args, **kwargs: [record])
        assert answer(document)[:2] == (0, f"{SHOWN}\n")
    monkeypatch.setattr(cli, "output", Console(width=160))  # a table would break lines at the escapes
    code, out, _ = answer(document, question=f"Who {STEERING}?", options=["--show-slots"])
    assert code == 0 and SHOWN in out
    code, _, err = answer(document, checkpoint=f"nobody/{STEERING}")
    assert code == 1 and SHOWN in err
    assert not {*STEERING} & {*out, *err} - {*"0;title 21mJ[]"}
    row = {"question": STEERING, "answers": [f"{STEERING} zebra"]}
    assert not {"\x1b", "\x07"} & {*"".join(demo.answer_cell(row, demo.DemoAnswer(STEERING, 1, 1.0)))}


# Training


def test_train_runs_recipe_stages(run_cli, monkeypatch):
    calls = []
    monkeypatch.setattr(stages, "run_stages", lambda *arguments: calls.append(arguments))
    code, out, err = run_cli("train", "--recipe", "tiny", "--output", "mine", "--", "--seed", "2", "--max_steps=3")
    assert (code, out, err) == (0, "", "")
    folder = stages.RECIPES / "tiny"
    assert calls == [(stages.read_stages(folder, "mine", ["--seed", "2", "--max_steps=3"]), None)]
    assert run_cli("train", "--recipe", folder, "--stage", "2", "--accelerate", "cpu")[0] == 0
    assert calls[1] == (stages.read_stages(folder, only=2), "cpu")


def test_train_errors_print_one_line(run_cli, monkeypatch):
    monkeypatch.setattr(stages, "run_to_end", lambda command: 1)
    for options, message in (
        (("--recipe", "tiny", "--", "--output_dir", "x"), "Pass a folder for all stages as `--output`"),
        (("--recipe", "tiny", "--output", "none"), "1_reconstruction failed with exit code 1; the reason is above"),
    ):
        code, out, err = run_cli("train", *options)
        assert code == 1 and out == ""
        assert err.startswith("Error: ") and message in err and err.count("\n") == 1
    assert run_cli("train")[0] == run_cli("train", "--recipe", "tiny", "--stage", "4")[0] == 2


# The demo


def test_demo_prints_answers_immediately(chooser, monkeypatch):
    """Each answer is printed at once, beside that of the base model from text; a summary follows at the end."""
    monkeypatch.setattr(demo, "contains_match", lambda answer, golds: float(golds == CASES[0]["answers"]))
    console, shown, from_text, texts = Console(file=io.StringIO(), width=400), [], demo.from_text, []

    def read_text(ask, row):
        shown.append(console.file.getvalue().count("positions"))
        texts.append(row)
        return from_text(ask, row)

    monkeypatch.setattr(demo, "from_text", read_text)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 2)
    demo.run_demo(chooser, console)
    assert shown == [0, *range(0, 28, 2)]  # the first answer warms up
    page = " ".join(console.file.getvalue().split())
    many, (refused,), cases = demo.demo_questions("unanswerable").values()
    assert cases == CASES and [len(row["passages"]) for row in many] == [10] * 10
    assert refused["question"] == many[0]["question"] and refused["answers"] == ["unanswerable"]
    others = [passage["text"] for passage in refused["passages"]]
    assert len(others) == 4 and not any(gold in text for gold in many[0]["answers"] for text in others)
    for row, text_row in zip([*many, refused, *cases], texts[1:], strict=True):
        assert row["question"] in page and len(text_row["passages"]) == 1 and text_row["passages"][0] in row["passages"]
        # The gold answer is not printed if both answers are right.
        assert (f"gold answer: {row['answers'][0]}" in page) == (row != CASES[0])
    # One gold answer is "unanswerable".
    assert page.count(", answerability ") == 14 and page.count(" unanswerable ") == 15
    assert "Result: 1 of 14 answers from slots are right (contain a gold answer), and 1 of 14 from text." in page
    assert console.file.getvalue().splitlines()[-1] == demo.NEXT
    assert [*map(len, demo.demo_questions().values())] == [10, 3]  # of an aligner that never abstains


def test_demo_row_shows_the_verdict():
    """A row of the demo is green if it is right, and has the gold answer if not."""
    answer = demo.DemoAnswer("Canada", positions=31, seconds=0.44, answerability=0.5)
    expected = "[green]Canada[/]\n[dim]right, 31 positions, 0.4 s, answerability 0.50[/]"
    assert demo.answer_cell(CASES[0], answer) == expected
    wrong = demo.answer_cell(CASES[0], demo.DemoAnswer("[red]", 70, 1.0))
    assert wrong == "[yellow]\\[red][/]\n[dim]wrong, 70 positions, 1.0 s[/]"
