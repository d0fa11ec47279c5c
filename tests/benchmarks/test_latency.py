"""The latency benchmark: rounds and their end, ratios within a round, targets, one command for all of it."""

import json

import pytest
import torch
from tiny_models import backbone_config
from training_rows import question_rows, write_rows
from typer.testing import CliRunner

from arcaligner.benchmarks import latency, report
from arcaligner.benchmarks.arms import ARMS, Arm
from arcaligner.benchmarks.latency import Bench, main, measure_rounds, measure_size, parse_dtypes, parse_sizes
from arcaligner.benchmarks.models import SHAPES, load_models, shape_of

PEAKS = {"flops_per_second": 1e9, "bytes_per_second": 1e9}


class Counting:
    """A decoder that counts."""

    def __init__(self):
        self.log = ""

    def restart(self):
        self.log += "|"

    def step(self):
        self.log += "."


@pytest.fixture(scope="module")
def bench(checkpoint_dir, processor):
    models = load_models(str(checkpoint_dir), torch.float32, "cpu")
    return Bench(*models, processor, question_rows(6), True, PEAKS)


@pytest.fixture(scope="module")
def size(bench):
    return {"dtype": "float32", **measure_size(bench, 3, 2, rounds=3, seconds=0.0)}


def test_at_least_three_rounds_are_timed_each_with_a_whole_answer():
    decoding = {"a": Counting(), "b": Counting()}
    found, tokens = measure_rounds({"x": Arm(lambda: None)}, decoding, "cpu", rounds=9, seconds=0.0)
    assert len(found) == 3 and len(tokens) == 3 * 15
    assert decoding["a"].log == decoding["b"].log == ("|" + "." * 15) * 3


def test_a_size_has_all_figures_of_all_arms(size, bench):
    assert tuple(size["arms"]) == ARMS and (size["k"], size["batch_size"], size["rounds"]) == (3, 2, 3)
    for name, arm in size["arms"].items():
        assert arm["first_token"]["lower"] <= arm["first_token"]["median"] <= arm["first_token"]["upper"]
        assert arm["first_token_limit"] == max(arm["flops"], arm["bytes"]) / 1e9
        assert arm["flops_counted"] > 0 and arm["per_token"]["median"] > 0 and arm["questions_per_second"]["median"] > 0
        length = size["text_tokens" if name.startswith("standard") else "slot_tokens"]
        assert arm["cache_bytes"] >= 3 * 2 * 2 * 8 * 4 * length  # layers, keys and values, heads, head_dim, float32
    assert set(size["encoder"]) == {"segmenting", "encoding"}
    assert size["arms"]["standard_rag"]["speed_up"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
    _, slots = bench.prompts(latency.pick_rows(bench.rows, bench.processor, 3, 2))
    is_slot = slots.whole.input_ids == bench.processor.context_token_id
    assert size["slots"] == int(is_slot.sum()) / 2 and 0 < size["open_share"] < 1
    lines = report.size_lines(size)
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")][1:] == [
        f"| {report._SHOWN[arm]}" for arm in ARMS
    ]
    assert size["same_first_token"] == {"standard_rag_cached": 1.0, "slots_cached": 1.0, "plain": 1.0}
    assert size["refinement_flops_ratio"] > 1
    assert size["prefix_bytes_ratio"] > 1


def test_arms_and_encoder_take_turns_in_a_rotating_order(bench, monkeypatch):
    seen = []

    def time_interleaved(turns, first, device):
        seen.append((list(turns), first))
        return dict.fromkeys(turns, 1.0)

    monkeypatch.setattr(latency, "time_interleaved", time_interleaved)
    measure_size(bench, 1, 1, rounds=3, seconds=0.0)
    prefills = [(turns, first) for turns, first in seen if "plain" in turns]
    assert prefills == [([*ARMS, "segmenting", "encoding"], number) for number in range(3)]
    steps = [(turns, first) for turns, first in seen if "plain" not in turns]
    assert steps == [(["standard_rag", "slots", "backbone"], number) for number in range(45)]


def test_all_weights_are_read_before_an_arm_is_measured(bench):
    read = []
    hooks = [
        module.register_forward_hook(lambda module, *_: read.append(module))
        for model in (bench.aligner, bench.base)
        for module in (model.lm_head, *model.get_decoder().modules())
        if isinstance(module, torch.nn.Linear) and "lora" not in type(module).__module__
    ]
    Bench(bench.aligner, bench.base, bench.processor, bench.rows, True, PEAKS)
    for hook in hooks:
        hook.remove()
    heads = [bench.aligner.lm_head, bench.base.lm_head]
    assert all(any(module is head for module in read) for head in heads) and len(read) >= 2 * (1 + 3 * 7)


def test_a_prompt_longer_than_the_backbones_context_is_refused(bench, monkeypatch):
    monkeypatch.setattr(bench.base.config, "max_position_embeddings", 64)
    with pytest.raises(ValueError, match="A prompt with 3 passages and its answer have .* tokens, but"):
        measure_size(bench, 3, 1, rounds=3, seconds=0.0)


def test_ratios_are_taken_within_a_round():
    seconds = [{"a": 2.0, "b": 1.0}, {"a": 40.0, "b": 10.0}, {"a": 9.0, "b": 3.0}]
    assert report.ratio(seconds, "a", "b") == {"lower": 2.5, "median": 3.0, "upper": 3.5}


def test_refinement_is_compared_by_what_it_adds():
    rounds = [{"off": base, "adaptive": base + 1.0, "plain": base + 6.0} for base in (1.0, 50.0, 3.0)]
    assert report.refinement_ratio(rounds) == 6.0
    assert report.refinement_ratio([{**each, "adaptive": each["off"]} for each in rounds]) is None


def size_with(k, **speed_ups):
    """What the targets look at."""
    names = ("off", "adaptive", "budgeted", "slots_cached")
    return {
        "k": k,
        "arms": {name: {"speed_up": {"median": speed_ups.get(name, 0.0)}} for name in names},
        "cached_speed_up": {"median": 1.2},
        "prefix_bytes_ratio": 23.0,
        "refinement_ratio": None,
        "decoding_ratio": {"median": 1.03},
    }


def test_targets_are_those_of_their_number_of_passages():
    met = {
        each["what"]: (each["bound"], each["met"])
        for each in report.targets(size_with(5, off=8, adaptive=6, budgeted=7))
    }
    assert met == {
        "first token, off": (8.0, True),
        "first token, adaptive": (6.4, False),
        "first token, adaptive within 20%": (6.4, True),
        "added by refinement, plain over adaptive": (4.0, True),
        "time per output token over the bare backbone's": (1.02, False),
    }
    found = report.targets(size_with(20, off=14.9, adaptive=12.0, budgeted=11.9, slots_cached=25.0))
    assert [(each["bound"], each["met"]) for each in found] == [
        (15.0, False),
        (12.0, True),
        (12.0, False),
        (25.0, True),
        (1.0, True),
        (24.0, False),
        (4.0, True),
        (1.02, False),
    ]
    assert len(report.targets(size_with(1))) == 2


def run_latency(options):
    app = latency.typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, options)


def test_a_run_that_broke_off_goes_on_with_the_sizes_that_are_missing(tmp_path, checkpoint_dir, monkeypatch):
    data, output = tmp_path / "rows.jsonl", tmp_path / "found"
    write_rows(data, question_rows(6))

    def measured_once(bench, k, *args):
        if k == 2:
            raise KeyboardInterrupt
        return measure_size(bench, k, *args)

    monkeypatch.setattr(latency, "measured_peaks", lambda device, dtype: PEAKS)
    monkeypatch.setattr(latency, "measure_size", measured_once)
    options = ["--sizes", "1x1,2x1", "--seconds", "0", "--checkpoint", str(checkpoint_dir), "--data", str(data)]
    options += ["--output", str(output)]
    assert run_latency(options).exit_code != 0
    (partial,) = output.iterdir()
    left = json.loads(partial.read_text("utf-8"))
    assert partial.name == "latency.partial.json" and [each["k"] for each in left["sizes"]] == [1]

    other = run_latency([*options, "--data", str(latency.ROOT / "tests/data/squad_dev_sample.jsonl")])
    assert isinstance(other.exception, ValueError) and "with data rows.jsonl and not" in str(other.exception)
    monkeypatch.setattr(latency, "measured_peaks", None)  # these are kept, too
    monkeypatch.setattr(latency, "measure_size", measure_size)
    asked_in_another_order = [*options, "--sizes", "2x1,1x1"]
    assert run_latency(asked_in_another_order).exit_code == 0
    found = json.loads((output / "latency.json").read_text("utf-8"))
    assert [each["k"] for each in found["sizes"]] == [2, 1] and found["sizes"][1] == left["sizes"][0]
    assert found["peaks"] == left["peaks"] and not partial.exists()


def test_the_command_writes_one_json_line_tables_and_a_picture(tmp_path, checkpoint_dir, monkeypatch):
    data, output = tmp_path / "rows.jsonl", tmp_path / "found"
    write_rows(data, question_rows(6))
    monkeypatch.setattr(latency, "measured_peaks", lambda device, dtype: PEAKS)
    options = ["--sizes", "1x1,2x2", "--dtype", "float32,bfloat16", "--seconds", "0"]
    options += ["--checkpoint", str(checkpoint_dir), "--data", str(data), "--output", str(output)]
    result = run_latency(options)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    found = json.loads(lines[0])
    assert len(lines) == 1 and found["data"] == "rows.jsonl" and list(found["peaks"]) == ["float32", "bfloat16"]
    assert [(each["dtype"], each["k"], each["batch_size"]) for each in found["sizes"]] == [
        ("float32", 1, 1),
        ("float32", 2, 2),
        ("bfloat16", 1, 1),
        ("bfloat16", 2, 2),
    ]
    assert all(each["targets"] for each in found["sizes"])
    assert "## 2 passages x 2 questions, bfloat16" in result.output and "at least 4" in result.output
    assert json.loads((output / "latency.json").read_text("utf-8"))["sizes"] == found["sizes"]
    assert {path.name for path in output.iterdir()} == {f"latency.{end}" for end in ("json", "png", "svg")}


def test_a_shape_is_measured_with_random_weights_and_without_an_encoder(tmp_path, checkpoint_dir, monkeypatch, capsys):
    data = tmp_path / "rows.jsonl"
    write_rows(data, question_rows(6))
    monkeypatch.setitem(SHAPES, "mistral_7b", backbone_config("mistral", max_position_embeddings=512).to_dict())
    monkeypatch.setattr(latency, "measured_peaks", lambda device, dtype: PEAKS)
    options = {"checkpoint": str(checkpoint_dir), "data": data, "seconds": 0.0, "rounds": 3, "device": "cpu"}
    main(sizes="2x2", dtype="bfloat16", shape="mistral_7b", layers=5, output=None, **options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    size = found["sizes"][0]
    assert (found["model"], found["layers"], size["encoder"]) == ("mistral_7b", 5, {})
    assert size["open_layers"] == pytest.approx(1 / 5) and tuple(size["arms"]) == ARMS


def test_sizes_dtypes_and_shapes_that_are_none_are_refused():
    for text in ("5", "0x1", "5x1x1", "ax1", "", "5x1,"):
        with pytest.raises(ValueError, match="expected passages x questions of a batch"):
            parse_sizes(text)
    assert parse_sizes("1x1,20x8") == [(1, 1), (20, 8)]
    with pytest.raises(ValueError, match="`--dtype` names float64; expected float32, bfloat16"):
        parse_dtypes("float32,float64")
    with pytest.raises(ValueError, match="expected mistral_7b or llama_3_1_8b"):
        shape_of("gpt", None)
    assert shape_of("llama_3_1_8b", 4)["num_hidden_layers"] == 4
