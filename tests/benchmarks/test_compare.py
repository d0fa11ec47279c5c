"""Text and slots compared on the user's own questions."""

import json

import pytest
from conftest import chat_inputs, greedy_answer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from arcaligner.answering_arcaligner import Answerer
from arcaligner.benchmarks.compare import COLUMNS, Reader, TimedAnswer, cells_of
from arcaligner.common.rows import token_f1
from arcaligner.train.prompts import full_text, with_selected

LETTER = "It was written by Ada. Nobody else knew. She wrote it in May."
OTHER = {"title": "Ships", "text": "The ship left on Monday. It came back in June."}
ROWS = [
    {"question": "Who wrote it?", "answers": ["Ada"], "passages": [{"title": "", "text": LETTER}, OTHER]},
    {"question": "When did it leave?", "passages": [OTHER]},
]


pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def ask(run_cli, checkpoint_dir, tmp_path):
    """Compares at two compressions; returns exit code, output and errors."""

    def run(rows, *arguments):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        command = ("compare", "--questions", path, "--checkpoint", checkpoint_dir, "--output", tmp_path / "out")
        return run_cli(*command, "--tokens-per-slot", "2,segment", *arguments)

    return run


def test_every_reader_answers(ask, tmp_path, model, processor, base_model_dir):
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    reader = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model_dir), lora)
    reader.save_pretrained(tmp_path / "lora")
    code, out, err = ask(ROWS, "--full-text-lora", tmp_path / "lora")
    assert code == 0, err
    assert out.strip() in (tmp_path / "out" / "comparison.md").read_text()
    columns, _, *table = [line.strip("| ").split(" | ") for line in out.splitlines()[:6]]
    plain, tuned, slots = "text, by the base model", "text, by the fine-tuned base model", "slots, 2 tokens per slot"
    assert tuple(columns) == COLUMNS
    assert [cells[0] for cells in table] == [plain, tuned, slots, "slots, one slot per segment"]
    assert table[0][1] == table[1][1] and table[0][4] == "100.0"  # the same text; agreement is with the plain reader
    assert "2 questions, 1 with answers." in out.splitlines()[-1]
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    for row, answer in zip(ROWS, answers, strict=True):
        text = chat_inputs(processor, full_text(row))
        compressed = chat_inputs(processor, row["question"], row["passages"], tokens_per_slot=2)
        for title, model_of, inputs in ((plain, model, text), (tuned, reader, text), (slots, model, compressed)):
            assert answer[title] == greedy_answer(model_of, processor, inputs, 4).strip()
    assert any(answer[plain] != answer[tuned] for answer in answers)


def test_folder_is_searched(ask, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "letter.txt").write_text(LETTER)
    (tmp_path / "texts" / "ship.txt").write_text(OTHER["text"])
    code, out, err = ask([{"question": "Who wrote it?"}], "--documents", tmp_path / "texts", "--top-k", 1)
    assert code == 0, err
    assert "| - | - |" in out.splitlines()[2] and "1 question, 0 with answers." in out


@pytest.mark.parametrize(
    ("rows", "option", "message"),
    [
        ([], None, "mine.jsonl contains no questions; expected lines such as"),
        ([{"question": " "}], None, "contains no questions"),
        ([{"question": 3}], None, "mine.jsonl, line 1: `question` is 3 (int); expected a string."),
        ([{"question": "Who?"}], None, "The question 'Who?' has no `passages`, and no documents were passed"),
        ([{"question": "Who?"}], "--documents", "Found no document with text"),
        ([ROWS[0]], "--full-text-lora", "empty"),
    ],
)
def test_compare_errors_print_one_line(ask, tmp_path, rows, option, message):
    (tmp_path / "empty").mkdir()
    code, out, err = ask(rows, *((option, tmp_path / "empty") if option else ()))
    assert (code, out) == (1, "") and err.splitlines()[-1].startswith("Error: ") and message in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_unused_documents_are_reported(ask, tmp_path, caplog):
    """Documents that no question needs give a warning."""
    (tmp_path / "texts").mkdir()
    code, _, _ = ask(ROWS, "--documents", tmp_path / "texts", "-n", 1)
    assert code == 0 and "`--documents` has no effect" in caplog.text


def test_scores_need_answers():
    """Scores are over the questions with answers, agreement over all."""
    text = [TimedAnswer("by Ada", 8, 0.2), TimedAnswer("June", 4, 0.4)]
    slots = [TimedAnswer("Ada", 8, 0.1), TimedAnswer("May", 4, 0.5)]
    rows = [{"answers": ["Ada"]}, {"answers": []}]
    agreement = f"{50 * token_f1('Ada', ['by Ada']):.1f}"
    assert cells_of("slots", slots, text, rows)[:5] == ["slots", "6", "100.0", "100.0", agreement]
    assert [cells_of("any", column, text, rows)[5] for column in (text, slots)] == ["300 ms", "300 ms (x1.4)"]


def test_slots_of_top_ranked_passages(separate):
    """Of more passages, slots of the top-ranked ones are used."""
    model, reader = separate
    row = {"question": "Who wrote it?", "passages": [{"title": "", "text": LETTER}, OTHER]}
    answer = Reader("slots", 2, model, max_passages=1).ask(reader, row)
    (likely,) = with_selected(Answerer(model, reader), [row], 1, tokens_per_slot=2)
    assert answer[:2] == Reader("slots", 2, model).ask(reader, likely)[:2]
    assert Reader("slots", 2, model, max_passages=2).ask(reader, row).positions > answer.positions
