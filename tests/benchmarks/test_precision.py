"""The precision benchmark: what differs between two backbones is told by its cause, by layer and by question."""

import json

import pytest
import torch
from tiny_models import backbone_config
from training_rows import passage_rows, question_rows, write_rows
from typer.testing import CliRunner

from arcaligner.benchmarks import precision
from arcaligner.benchmarks.gate_probes import asked_gates, spread_gates
from arcaligner.benchmarks.precision import Compared, compare, load_pair, main, make_inputs, random_pair, summarise


@pytest.fixture(scope="module")
def pair(checkpoint_dir, processor):
    """The checkpoint's, with gates that are not saturated."""
    full, half = load_pair(str(checkpoint_dir), "cpu")
    spread_gates(full, make_inputs(full, processor, question_rows(3), encodes=True))
    for own, other in zip(asked_gates(full).values(), asked_gates(half).values(), strict=True):
        other.load_state_dict(own.state_dict())
    return full, half


@pytest.fixture(scope="module")
def inputs(pair, processor):
    return make_inputs(pair[0], processor, question_rows(1), encodes=True)


def test_the_pair_differs_in_the_backbone_alone(pair):
    full, half = (dict(model.named_parameters()) for model in pair)
    assert list(full) == list(half)
    for name, parameter in full.items():
        is_aligner = pair[0].is_aligner_key(name)
        assert parameter.dtype == torch.float32
        assert half[name].dtype == (torch.float32 if is_aligner else torch.bfloat16)
        assert torch.equal(half[name], parameter.to(half[name].dtype))


def test_a_model_decides_as_itself(pair, inputs):
    found = compare(pair[0], pair[0], inputs)
    assert torch.equal(found.probs[2], found.probs[0]) and torch.equal(found.probs[3], found.probs[0])
    assert torch.equal(found.depths[0], found.depths[1]) and found.answers[0] == found.answers[1]
    moved = (found.probs[1] - found.probs[0]).abs()
    assert 0 < float(moved.max()) < 0.1  # the gate that reads rounded states


def test_decisions_and_depths_of_each_model_fit_together(pair, inputs):
    found = compare(*pair, inputs)
    num_slots = int((inputs["input_ids"] == pair[0].config.context_token_id).sum())
    assert found.probs.shape == (4, 2, num_slots) and found.depths.shape == (2, 2, num_slots)
    assert torch.equal(found.probs[0] >= 0.5, found.depths[0] > 0)
    assert torch.equal(found.probs[3] >= 0.5, found.depths[1] > 0)
    assert len({tuple(each.flatten().tolist()) for each in found.probs}) == 4
    # The first layer's states are the same text and slots, so all that moves there is what the layer rounds.
    assert torch.equal(found.probs[2, 0], found.probs[3, 0])


def test_shares_are_those_of_all_slots_of_all_questions():
    first = Compared(
        probs=torch.tensor(
            [
                [[0.9, 0.4], [0.6, 0.1]],
                [[0.9, 0.4], [0.6, 0.1]],
                [[0.9, 0.6], [0.6, 0.1]],
                [[0.9, 0.55], [0.45, 0.1]],
            ]
        ),
        depths=torch.tensor([[[2, 0], [1, 0]], [[2, 1], [0, 0]]]),
        answers=([5, 6], [5, 7]),
    )
    second = Compared(
        probs=torch.tensor([[[0.2], [0.7]]] * 4), depths=torch.tensor([[[0], [1]], [[0], [2]]]), answers=([4], [4])
    )
    found = summarise([first, second], [3, 7], 0.5)
    assert (found["questions"], found["slots"], found["decisions"], found["open"]) == (2, 3, 6, 0.5)
    shares = {cause: each["share"] for cause, each in found["decisions_differ"].items()}
    assert shares == pytest.approx({"gate": 0.0, "layer": 1 / 6, "backbone": 2 / 6})
    # Of two questions the bootstrap takes one twice or both.
    assert found["decisions_differ"]["backbone"] == pytest.approx({"share": 2 / 6, "lower": 0.0, "upper": 0.5})
    assert found["depths_differ"]["share"] == 0.5
    layers = [
        [each["layer"], each["open"], *each["decisions_differ"].values(), each["depths_differ"]]
        for each in found["by_layer"]
    ]
    assert layers[0] == pytest.approx([3, 1 / 3, 0.0, 1 / 3, 1 / 3, 1 / 3])
    assert layers[1] == pytest.approx([7, 2 / 3, 0.0, 0.0, 1 / 3, 2 / 3])
    assert found["from_threshold"]["flipped"] == pytest.approx({"median": 0.1, "95 %": 0.1, "max": 0.1})
    assert found["from_threshold"]["all"]["median"] == pytest.approx(0.25)
    moves = {cause: each["max"] for cause, each in found["probability_moves"].items()}
    assert moves == pytest.approx({"gate": 0.0, "layer": 0.2, "backbone": 0.15})
    assert (found["same_first_token"], found["same_answer"]) == (1.0, 0.5)
    assert (found["questions_with_other_depths"], found["same_answer_where_depths_differ"]) == (2, 1)
    assert summarise([second], [3, 7], 0.5)["from_threshold"]["flipped"] is None


def command(options: list[str]):
    app = precision.typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, options, catch_exceptions=False)


def test_the_command_writes_one_json_line_and_a_table(tmp_path, checkpoint_dir):
    data, output = tmp_path / "rows.jsonl.gz", tmp_path / "found.json"
    write_rows(data, passage_rows(2) + question_rows(3))
    result = command(["--checkpoint", str(checkpoint_dir), "--data", str(data), "-n", "2", "--output", str(output)])
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if line.startswith("{"))
    report = json.loads(line)
    assert output.read_text("utf-8") == line + "\n" and report["machine"]["torch"]
    assert (report["questions"], report["layers"], report["attn_implementation"]) == (2, 3, "sdpa")
    assert [each["layer"] for each in report["by_layer"]] == [0, 1] and 0 < report["open"] < 1
    assert "layer alone" in output.with_suffix(".txt").read_text("utf-8")


def test_a_shape_is_compared_with_the_same_random_weights_and_gates(processor):
    shape = backbone_config("mistral", max_position_embeddings=512, num_hidden_layers=5).to_dict()
    full, half = random_pair(shape, processor, question_rows(3), "cpu")
    other = dict(half.named_parameters())
    for name, parameter in full.named_parameters():
        torch.testing.assert_close(other[name].float(), parameter, rtol=1e-2, atol=1e-4)
    found = compare(full, half, make_inputs(full, processor, question_rows(1), encodes=False))
    assert len(asked_gates(full)) == 4 and 0 < float((found.depths > 0).float().mean()) < 1


def test_what_has_no_slots_or_no_gates_is_refused(tmp_path, checkpoint_dir, model):
    data = tmp_path / "rows.jsonl"
    write_rows(data, passage_rows(2))
    with pytest.raises(ValueError, match="No row of .* has a question and a passage"):
        command(["--checkpoint", str(checkpoint_dir), "--data", str(data)])
    with pytest.raises(ValueError, match="expected mistral_7b or llama_3_1_8b"):
        command(["--shape", "gpt"])
    model.set_stage("grounding")
    model.save_pretrained(tmp_path / "stage_2")
    with pytest.raises(ValueError, match="decide nothing: its `gate_mode` is 'off', and 2 layers"):
        load_pair(str(tmp_path / "stage_2"), "cpu")
