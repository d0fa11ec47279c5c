"""The report asks each question in each way, keeps what it has, and counts what it says it counts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from training_rows import question_rows, write_rows
from transformers import AutoModelForCausalLM

from arcaligner import ArcAlignerConfig
from arcaligner.evaluation import answering, report
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.report import GATE_MODES, SETS, WAYS, load_model, markdown, read_set, summarize
from arcaligner.model_card_arcaligner import write_model_card

OF_ALIGNER = [way for way in WAYS if way not in ("full text, LoRA", "projector only")]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(answering, "MAX_NEW_TOKENS", 4)


@pytest.fixture
def data(tmp_path) -> Path:
    """Four questions of each set; those of HotpotQA have a distractor among their passages."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in SETS.values():
        rows = [{**row, "id": f"{name}-{number}"} for number, row in enumerate(question_rows(4))]
        if name == "hotpotqa":
            for row in rows:
                row["passages"] = [{"title": "", "text": "This is one. Not that."}, *row["passages"]]
                row["meta"] = {"gold": [1]}
        write_rows(folder / f"{name}.jsonl.gz", rows)
    return folder


@pytest.fixture
def measured(monkeypatch) -> list[tuple[str, str, int]]:
    """Way, checkpoint and number of rows of what would have been measured; answers are all the first gold."""
    calls = []

    def measure(way, checkpoint, aligner, rows, batch_size, device):
        calls.append((way, checkpoint, len(rows)))
        scores = {"em": 1.0, "f1": 1.0, "em_raw": 0.0}
        return {
            "checkpoint": checkpoint,
            "fingerprint": report.fingerprint(checkpoint),
            "seconds": 2.0,
            "machine": "here",
            "prompt_tokens": 40,
            "rows": [{"id": row["id"], "prediction": row["answers"][0], **scores} for row in rows],
        }

    monkeypatch.setattr(report, "measure", measure)
    return calls


@pytest.fixture(scope="module")
def other_checkpoints(tmp_path_factory, base_model_dir, checkpoint_dir) -> dict[str, str]:
    """A LoRA of the base model that is not zero, and an aligner in another folder."""
    folder = tmp_path_factory.mktemp("others")
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base_model_dir), lora).save_pretrained(folder / "lora")
    shutil.copytree(checkpoint_dir, folder / "projector")
    return {"full_text_lora": str(folder / "lora"), "projector_only": str(folder / "projector")}


def run(checkpoint, output, data, **options) -> dict:
    report.main(str(checkpoint), output, data=data, **{"num_questions": 4, "batch_size": 2, **options})
    return json.loads((output / "results.json").read_text("utf-8"))


def test_a_run_answers_all_sets_in_all_ways(tmp_path, data, checkpoint_dir, other_checkpoints, model, processor):
    output = tmp_path / "out"
    summary = run(checkpoint_dir, output, data, sets=["SQuAD", "HotpotQA"], num_questions=3, **other_checkpoints)
    assert list(summary["sets"]) == ["SQuAD", "HotpotQA"]
    rows = read_set(data / "squad.jsonl.gz", 3)
    for entry in summary["sets"].values():
        assert list(entry["methods"]) == list(WAYS)
        assert entry["slots_per_question"] == 2.0  # 3, 2 and 1 sentences: the distractor's two are not asked
        tokens = [len(processor.tokenizer(row["passages"][0]["text"])["input_ids"]) for row in rows]
        assert entry["compression_rate"] == sum(tokens) / 6
    files = {path.name: json.loads(path.read_text("utf-8")) for path in (output / "squad").iterdir()}
    assert len(files) == len(WAYS) and "full_text_LoRA.json" in files and "ours_adaptive.json" in files
    for result in files.values():
        assert [row["id"] for row in result["rows"]] == ["squad-0", "squad-1", "squad-2"]
        assert result["seconds"] > 0
    # The answers and steps of one way, made here one question after the other.
    adaptive, depths = files["ours_adaptive.json"], []
    model.config.gate_mode = "adaptive"
    for row, kept in zip(rows, adaptive["rows"], strict=True):
        inputs = answering.slot_inputs(processor, [row])
        output_ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert kept["prediction"] == processor.decode(output_ids, skip_special_tokens=True).strip()
        depths.append(model(**inputs).recursion_depth.flatten().float())
    steps = summary["sets"]["SQuAD"]["refinement_steps"]
    assert steps == pytest.approx(torch.cat(depths).mean().item()) and 0 < steps < 2
    assert not list(output.rglob("*.tmp"))


def test_gold_passages_are_asked_where_the_file_tells_them(data):
    for name in ("squad", "hotpotqa"):
        for row, expected in zip(read_set(data / f"{name}.jsonl.gz", 4), question_rows(4), strict=True):
            assert row["passages"] == expected["passages"]


def test_each_way_has_its_model_and_gate_mode(checkpoint_dir, other_checkpoints, base_model_dir):
    modes = {way: load_model(way, str(checkpoint_dir), str(checkpoint_dir))[0].config.gate_mode for way in OF_ALIGNER}
    assert modes == {"closed book": "off", "full text": "off"} | GATE_MODES
    assert set(GATE_MODES.values()) == {"off", "adaptive", "always"}
    projector = other_checkpoints["projector_only"]
    assert load_model("projector only", projector, str(checkpoint_dir))[0].config.gate_mode == "off"
    model, processor = load_model("full text, LoRA", other_checkpoints["full_text_lora"], str(checkpoint_dir))
    inputs = answering.text_inputs(processor, question_rows(1), answering.full_text)
    base = AutoModelForCausalLM.from_pretrained(base_model_dir, dtype=torch.float32)
    assert not torch.allclose(model(**inputs).logits, base(**inputs).logits)


def test_a_second_run_does_what_is_missing(tmp_path, data, checkpoint_dir, measured):
    output = tmp_path / "out"
    run(checkpoint_dir, output, data, sets=["NQ"])
    assert measured == [(way, str(checkpoint_dir), 4) for way in OF_ALIGNER]
    (output / "nq" / "ours_off.json").unlink()
    run(checkpoint_dir, output, data, sets=["NQ", "PopQA"], only=["ours (off)"])
    assert [way for way, _, _ in measured[len(OF_ALIGNER) :]] == ["ours (off)", "ours (off)"]


def test_a_run_that_broke_keeps_what_it_had(tmp_path, data, checkpoint_dir, measured, monkeypatch):
    whole, output = report.measure, tmp_path / "out"

    def broken(way, *arguments):
        if way == "ours (off)":
            raise KeyboardInterrupt
        return whole(way, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report, "measure", broken)
        run(checkpoint_dir, output, data, sets=["SQuAD"])
    assert not (output / "results.json").exists()
    run(checkpoint_dir, output, data, sets=["SQuAD"])
    assert [way for way, _, _ in measured] == OF_ALIGNER


def test_several_runs_fill_one_folder_and_the_summary_is_of_all_files(
    tmp_path, data, checkpoint_dir, measured, other_checkpoints
):
    output = tmp_path / "out"
    run(checkpoint_dir, output, data, sets=["SQuAD"], only=["full text, LoRA"], **other_checkpoints)
    run(checkpoint_dir, output, data, sets=["PopQA"], only=["ours (adaptive)", "closed book"], num_questions=3)
    summary = run(checkpoint_dir, output, data, sets=["SQuAD"], only=["ours (off)"])
    methods = {name: list(entry["methods"]) for name, entry in summary["sets"].items()}
    assert methods == {"SQuAD": ["full text, LoRA", "ours (off)"], "PopQA": ["closed book", "ours (adaptive)"]}
    assert summary["questions"] == 3 and summary["sets"]["SQuAD"]["questions"] == 4
    assert "Questions: SQuAD 4, PopQA 3;" in (output / "report.md").read_text("utf-8")


def test_another_process_writing_the_same_file_is_not_disturbed(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.json"
    replace = report.os.replace

    def other_first(source, target):  # the other process is at the same point, and done before
        with monkeypatch.context() as patch:
            patch.setattr(report.os, "replace", replace)
            patch.setattr(report.os, "getpid", lambda: -1)
            report.write_whole(path, "theirs")
        replace(source, target)

    monkeypatch.setattr(report.os, "replace", other_first)
    report.write_whole(path, "ours")
    assert path.read_text() == "ours" and list(path.parent.iterdir()) == [path]


def test_answers_of_another_checkpoint_or_to_other_questions_are_refused_at_once(
    tmp_path, data, checkpoint_dir, measured, other_checkpoints
):
    output = tmp_path / "out"
    run(checkpoint_dir, output, data, sets=["SQuAD"])
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint_dir, changed)
    run(changed, output, data, sets=["SQuAD"])  # the same weights elsewhere
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    calls = len(measured)
    message = f"closed_book.json holds 4 answers of {checkpoint_dir}, not the 4 of {changed} as it is now"
    with pytest.raises(ValueError, match=message):
        run(changed, output, data, sets=["NQ"])
    with pytest.raises(ValueError, match="holds 4 answers of .*, not the 2 of"):
        run(checkpoint_dir, output, data, num_questions=2)
    write_rows(data / "squad.jsonl.gz", question_rows(4))
    with pytest.raises(ValueError, match="Name another output folder, or delete the file"):
        run(checkpoint_dir, output, data)
    assert len(measured) == calls


def test_mistakes_in_the_options_are_named_before_anything_is_asked(tmp_path, data, checkpoint_dir, measured):
    output = tmp_path / "out"
    with pytest.raises(typer.BadParameter, match=r"Unknown set \['TriviaQA'\]; known: SQuAD, NQ, HotpotQA, PopQA"):
        run(checkpoint_dir, output, data, sets=["SQuAD", "TriviaQA"])
    with pytest.raises(
        typer.BadParameter, match=r"Unknown way \['full text, LoRA'\]; known: closed book, full text, ours"
    ):
        run(checkpoint_dir, output, data, only=["full text, LoRA"])  # no LoRA is named
    with pytest.raises(ValueError, match="There is no checkpoint in .*unfinished: no weights"):
        run(checkpoint_dir, output, data, full_text_lora=str(tmp_path / "unfinished"))
    assert not measured and not output.exists()


def test_refinement_steps_are_those_of_the_slots_of_all_batches():
    depths = [torch.tensor([[[0, 2], [1, -1]]]), torch.tensor([[[2, 2, 2]]])]  # -1 is no slot
    model = SimpleNamespace(model=lambda number: SimpleNamespace(recursion_depth=depths[number]))
    assert report.refinement_steps(model, [([0], {"number": 0}), ([1], {"number": 1})]) == 1.5


def results(scores: list[float]) -> dict:
    rows = [{"em": score, "f1": score / 2, "em_raw": 0.0} for score in scores]
    return {"rows": rows, "machine": "here", "seconds": 3.0, "prompt_tokens": 10 * len(scores)}


def test_numbers_are_means_in_percent_with_intervals():
    ours = results([1.0, 0.0, 0.0, 1.0]) | {"passage_tokens": 300, "slots": 10, "refinement_steps": 0.25}
    summary = summarize({"SQuAD": {"closed book": results([0.0] * 4), "ours (adaptive)": ours}})
    entry = summary["sets"]["SQuAD"]
    assert entry["methods"]["ours (adaptive)"] == {
        "em": [50.0, *bootstrap_interval([100, 0, 0, 100])],
        "f1": [25.0, *bootstrap_interval([50, 0, 0, 50])],
        "em_raw": [0.0, 0.0, 0.0],
        "prompt_tokens": 10.0,
        "seconds": 3.0,
    }
    assert (entry["compression_rate"], entry["slots_per_question"], entry["refinement_steps"]) == (30.0, 2.5, 0.25)
    assert summary["questions"] == entry["questions"] == 4


def test_tables_have_a_row_a_way_and_a_column_a_set():
    summary = summarize({"SQuAD": {"full text": results([1.0])}, "NQ": {"ours (off)": results([0.0])}})
    lines = markdown(summary).splitlines()
    assert lines[:4] == [
        "| F1 | SQuAD | NQ |",
        "|---|---|---|",
        "| full text | 50.0 [50.0, 50.0] |  |",
        "| ours (off) |  | 0.0 [0.0, 0.0] |",
    ]
    assert "| full text | 10 (3 s) |  |" in lines
    assert [line.split(" |")[0] for line in lines if "SQuAD |" in line] == [
        "| F1",
        "| EM (non-strict)",
        "| EM (raw)",
        "| prompt tokens and slots (seconds)",
    ]


def test_the_model_card_is_written_from_the_results(tmp_path, data, checkpoint_dir, measured):
    run(checkpoint_dir, tmp_path, data, sets=["SQuAD", "NQ"])
    write_model_card(ArcAlignerConfig.from_pretrained(checkpoint_dir), tmp_path)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "4 questions of each set" in card
    assert "| EM (non-strict) | SQuAD | NQ |" in card
    for way in OF_ALIGNER:
        assert f"| {way} | 100.0 [100.0, 100.0] | 100.0 [100.0, 100.0] |" in card
    assert "seconds" not in card
