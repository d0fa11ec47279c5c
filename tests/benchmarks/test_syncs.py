"""A guard: slots make the host wait no more than it must, and a decoded token no more than the bare base model's."""

import json

import pytest
import torch
from conftest import ENCODER_WIDTH
from tiny_models import backbone_config, tiny_aligner
from training_rows import question_rows, write_rows
from typer.testing import CliRunner

from arcaligner.benchmarks import syncs
from arcaligner.benchmarks.models import SHAPES, base_of
from arcaligner.benchmarks.prompts import both_prompts, pick_rows, random_embeds
from arcaligner.benchmarks.syncs import gates_asked, main, measure

# Where slots are and whether they can be, whatever the number of layers.
MOST_READS_OF_SLOTS = 1


def find(processor, num_layers: int):
    """Reads by name with random gates of `num_layers` layers, the depths, and the aligner's configuration."""
    vocab_size = len(processor.tokenizer)
    settings = {"num_hidden_layers": num_layers, "vocab_size": vocab_size, "max_position_embeddings": 512}
    aligner = tiny_aligner(
        backbone_config("llama", **settings),
        dtype=torch.float32,
        encoder_hidden_size=ENCODER_WIDTH,
        context_token_id=processor.context_token_id,
        max_refinement_steps=3,
    )
    rows = pick_rows(question_rows(6), processor, 3, 2)
    prompts = both_prompts(processor, rows, random_embeds(processor, rows, ENCODER_WIDTH), vocab_size)
    found, depth = measure(aligner, base_of(aligner, torch.float32, "cpu"), *prompts)
    return {name: sum(counts["operators"].values()) for name, counts in found.items()}, depth, aligner.config


@pytest.fixture(scope="module")
def small(processor):
    return find(processor, 3)


@pytest.fixture(scope="module")
def large(processor):
    return find(processor, 9)


@pytest.mark.parametrize("way", ["forward", "generate"])
def test_a_decoded_token_reads_no_more_than_the_bare_base_models(small, large, way):
    for found, *_ in (small, large):
        assert 0 < found[f"token by {way}, slots"] <= found[f"token by {way}, base"]


def test_a_prefill_without_refinement_reads_the_same_for_any_number_of_layers(small, large):
    assert small[0]["prefill, off"] == large[0]["prefill, off"]
    assert small[0]["prefill, off"] <= small[0]["prefill, text"] + MOST_READS_OF_SLOTS


def test_an_adaptive_prefill_reads_once_a_gate_that_is_asked_and_once_a_layer_that_is_open(small, large):
    for found, depth, config in (small, large):
        asked, open_layers = gates_asked(depth, config.max_refinement_steps, config.gated_layers)
        assert 0 < open_layers < asked
        assert found["prefill, adaptive"] - found["prefill, off"] <= asked + open_layers


def test_a_prefill_of_open_gates_reads_no_more_than_once_a_layer_and_step(small, large):
    for found, _, config in (small, large):
        layers = config.text_config.num_hidden_layers - 1
        assert found["prefill, always"] - found["prefill, off"] <= layers * config.max_refinement_steps


def test_gates_are_asked_until_none_is_open_and_never_at_the_last_layer():
    depth = torch.tensor([[[0, 0], [1, 0], [3, -1], [0, 0]], [[0, 0], [2, 1], [0, 0], [0, 0]]])  # 4 layers
    assert gates_asked(depth, 3, [0, 1, 2, 3]) == (1 + 3 + 3, 2)
    assert gates_asked(depth, 3, [1, 3]) == (3, 1)


def test_the_command_tells_each_number_and_the_lines_behind_it(tmp_path, checkpoint_dir):
    data, output = tmp_path / "rows.jsonl", tmp_path / "found.json"
    write_rows(data, question_rows(6))
    app = syncs.typer.Typer()
    app.command()(main)
    options = ["--checkpoint", str(checkpoint_dir), "--data", str(data), "--output", str(output)]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if line.startswith("{"))
    report = json.loads(line)
    assert output.read_text("utf-8") == line + "\n" and report["layers"] == 3 and report["machine"]["torch"]
    prefills = [f"prefill, {name}" for name in ("text", "off", "adaptive", "always")]
    tokens = [f"token by {way}, {name}" for way in ("forward", "generate") for name in ("base", "slots")]
    assert list(report["reads"]) == prefills + tokens
    for ways in report["reads"].values():
        lines = ways["operators"]["lines"]
        assert ways["operators"]["count"] == sum(each["times"] for each in lines) and lines
    asked = {each["line"].split(":")[0] for each in report["reads"]["prefill, adaptive"]["operators"]["lines"]}
    assert {"refinement_arcaligner", "modeling_arcaligner", "transformers.masking_utils"} <= asked
    assert "read_on_host" in output.with_suffix(".txt").read_text("utf-8")


def test_a_shape_is_counted_with_random_weights(tmp_path, checkpoint_dir, monkeypatch, capsys):
    data = tmp_path / "rows.jsonl"
    write_rows(data, question_rows(6))
    shape = backbone_config("mistral", max_position_embeddings=512).to_dict()
    monkeypatch.setitem(SHAPES, "mistral_7b", shape)
    options = {"checkpoint": str(checkpoint_dir), "data": data, "device": "cpu", "output": None}
    main(dtype="bfloat16", shape="mistral_7b", layers=5, **options)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["model"], report["layers"], report["open_layers"]) == ("mistral_7b", 5, 1)
    with pytest.raises(ValueError, match="`--dtype` is 'float64'; expected float32 or bfloat16"):
        main(dtype="float64", shape=None, layers=None, **options)
