"""The latency benchmark: what arms read, the order of rounds, ratios within a round; slots wait for the device once."""

import json
from functools import partial

import pytest
import torch
from conftest import processor_with
from tiny_models import backbone_config, collate, random_rows, tiny_aligner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_rows import question_rows, write_rows

from arcaligner import modeling_arcaligner
from arcaligner.benchmarks import arms
from arcaligner.benchmarks.arms import (
    base_of,
    both_prompts,
    first_tokens,
    join_rows,
    load_models,
    make_arms,
    prefill,
    select_rows,
    share,
    time_rounds,
)
from arcaligner.benchmarks.latency import main, measure_size, parse_sizes, read_zoomed
from arcaligner.evaluation.analyses import speed
from arcaligner.evaluation.answering import slot_inputs, text_inputs
from arcaligner.kv_cache_arcaligner import cache_of
from arcaligner.train.prompts import full_text, zoomed_inputs
from arcaligner.zoom_arcaligner import ZOOM


@pytest.fixture(params=[("joint", "start"), ("separate", "start"), ("separate", "end")], ids="-".join)
def models(checkpoint_dir, request):
    settings = dict(zip(("passage_attention", "passage_alignment"), request.param, strict=True))
    return load_models(str(checkpoint_dir), torch.float64, "cpu", **settings)


def states(outputs):
    """Keys and values of all layers."""
    return torch.stack([tensor for layer in cache_of(outputs).layers for tensor in (layer.keys, layer.values)])


@torch.no_grad()
def test_arms_share_the_prompts(models, processor, float64_model_code):
    """Arms use the prompts of the evaluation, also after a cache and a second time."""
    aligner, base = models
    own_weight = aligner.model.backbone.layers[0].mlp.up_proj.base_layer.weight
    assert base.model.layers[0].mlp.up_proj.weight.data_ptr() == own_weight.data_ptr()  # no memory of its own
    assert not any("lora" in name for name, _ in base.named_parameters())
    row = join_rows(select_rows(question_rows(6), processor, 3))
    reader = processor_with(processor, passage_attention=aligner.config.passage_attention)
    text, slots = both_prompts(aligner, reader, row, 4)
    for part in (slots.full, slots.prefix):
        part["context_embeds"] = part["context_embeds"].double()  # as exact as the models
    inputs = text_inputs(processor, [full_text(row)]), slot_inputs(reader, [row], tokens_per_slot=4)
    whole = {
        "standard_rag": base(**inputs[0], use_cache=True),
        "off": aligner(**inputs[1], gate_mode="off", use_cache=True),
    }
    for prompt, encoded in zip((text, slots), inputs, strict=True):
        assert torch.equal(prompt.full["input_ids"], encoded["input_ids"])
        assert torch.equal(prompt.suffix["input_ids"], text.suffix["input_ids"])  # the question
    assert processor.decode(text.suffix["input_ids"][0]).count(row["question"])
    assert (slots.prefix["input_ids"][:, -1] == processor.context_token_id).all()
    made = make_arms(*models, text, slots)
    for _ in range(2):  # an arm does not change models or prefixes
        for name, arm in made.items():
            outputs, expected = arm(), whole["standard_rag" if name.startswith("standard_rag") else "off"]
            torch.testing.assert_close(outputs.logits, expected.logits[:, -1:])
            torch.testing.assert_close(states(outputs), states(expected))


def test_rows_of_similar_length(processor):
    """The rows are those with the most similar lengths, with the question of the first one."""
    # Texts of about `size` tokens.
    passages = [{"title": "", "text": " " + "?" * size} for size in (1, 140, 400, 151, 170)]
    rows = [{"question": str(number), "passages": [passage]} for number, passage in enumerate(passages)]
    nearest = select_rows(rows, processor, 3)
    assert nearest == [rows[3], rows[1], rows[4]]
    assert join_rows(nearest) == {"question": "3", "passages": [passages[3], passages[1], passages[4]]}
    with pytest.raises(ValueError, match="The data file has 5 different passages with a question; expected at least 6"):
        select_rows(rows, processor, 6)


# Time


def test_rounds_rotate_arms(monkeypatch):
    """At least three rounds are timed, the first arm rotates, and ratios are within a round."""
    monkeypatch.setattr(arms, "MAX_ROUNDS", 4)
    seen, reported = [], []
    turns = {name: partial(seen.append, name) for name in "abc"}
    rounds = time_rounds(lambda number: turns, "cpu", 60.0, reported.append)
    assert "".join(seen) == "".join(reported) == "abcbcacababc"
    assert [list(times) for times in rounds] == [["a", "b", "c"]] * 4 and min(rounds[0].values()) > 0
    assert len(time_rounds(lambda number: turns, "cpu", 0.0)) == 3
    assert first_tokens([{"a": 2.0, "b": 1.0}, {"a": 40.0, "b": 10.0}, {"a": 9.0, "b": 3.0}], "b", "a") == {
        "first_token": {"lower": 2.0, "median": 3.0, "upper": 6.5},
        "speed_up": {"lower": 2.5, "median": 3.0, "upper": 3.5},
    }


def test_command_prints_json(tmp_path, checkpoint_dir, capsys):
    """The command prints a table and one line of JSON."""
    data, output = tmp_path / "rows.jsonl", tmp_path / "found"
    write_rows(data, question_rows(6))
    options = {"sizes": "2", "dtype": "float32", "tokens_per_slot": "4,segment", "device": "cpu"}
    main(str(checkpoint_dir), seconds=0.0, data=data, output=output, **options)
    printed = capsys.readouterr().out
    report = json.loads((output / "latency.json").read_text("utf-8"))
    assert [json.loads(line) for line in printed.splitlines() if line.startswith("{")] == [report]
    fine, coarse = report["sizes"]
    assert f"| 2 | {fine['text_tokens']} | 4 | {fine['slots']} |" in printed and report["data"] == "rows.jsonl"
    assert fine["slots"] > coarse["slots"] and [fine["tokens_per_slot"], coarse["tokens_per_slot"]] == [4, "segment"]
    for size in (fine, coarse):
        assert (size["k"], size["rounds"], list(size["encoder"])) == (2, 3, ["segmenting", "encoding"])
        assert list(size["arms"]) == list(speed.ARM_TITLES)
        assert size["arms"]["standard_rag"]["speed_up"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
        for name, arm in size["arms"].items():
            length = size["text_tokens" if name.startswith("standard") else "slots"]
            # layers, keys and values, heads, head_dim, float32; and up to 100 positions of the question
            assert 0 <= arm["cache_bytes"] - 3 * 2 * 2 * 8 * 4 * length < 3 * 2 * 2 * 8 * 4 * 100


def test_zoom_is_timed_above_the_own_compression(checkpoint_dir, processor):
    """The arm reads the finer slots that the first reading selects."""
    models = load_models(str(checkpoint_dir), torch.float32, "cpu", pointer_heads=[[0, 1], [2, 0]])
    own = processor_with(processor, tokens_per_slot=2)
    rows = question_rows(4)
    arms_of = {rate: measure_size(models, own, rows, 2, rate, seconds=0.0)["arms"] for rate in (2, 4)}
    assert "zoomed" not in arms_of[2] and arms_of[4]["off"]["cache_bytes"] < arms_of[4]["zoomed"]["cache_bytes"]
    row = join_rows(select_rows(rows, own, 2))
    inputs = slot_inputs(own, [row], tokens_per_slot=4)
    finer = zoomed_inputs(models[0], own, [row], inputs, 4, ZOOM)
    with torch.no_grad():
        found, expected = read_zoomed(models[0], own, row, inputs, 4), models[0](**finer, gate_mode="off")
    torch.testing.assert_close(found.logits, expected.logits[:, -1:], rtol=0, atol=1e-5)


def test_invalid_sizes_are_refused(checkpoint_dir, processor, monkeypatch):
    """Sizes that are not numbers, or too large, are refused."""
    for sizes in ("0", "5x1", "5,"):
        with pytest.raises(ValueError, match=f"`--sizes` is '{sizes}'; expected whole numbers of at least 1"):
            parse_sizes(sizes)
    models = load_models(str(checkpoint_dir), torch.float32, "cpu")
    monkeypatch.setattr(models[1].config, "max_position_embeddings", 64)
    with pytest.raises(
        ValueError,
        match="The text of 3 passages has .* positions, but the base model \\(of type `llama`\\) supports at most 64",
    ):
        measure_size(models, processor, question_rows(6), 3, "segment", seconds=0.0)


# Where the host waits for the device

aten = torch.ops.aten
OPERATORS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2}
METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__)  # no operator on a CPU


WAITS = []


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        WAITS.append(func.overloadpacket in OPERATORS)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        WAITS.append(func in METHODS)
        return func(*args, **(kwargs or {}))


def waits(run) -> int:
    """How often `run` waits for a value, or for a shape that depends on values."""
    WAITS.clear()
    with torch.no_grad(), _Methods(), _Operators():
        run()
    return sum(WAITS)


def test_slots_wait_once(monkeypatch):
    """Slots wait for the device once for all layers, and a decoded token never."""
    monkeypatch.setattr(modeling_arcaligner, "check_ids", lambda *_: None)  # looks at ids on the CPU alone
    aligner = tiny_aligner(backbone_config("llama", num_hidden_layers=9), dtype=torch.float32)
    base = base_of(aligner, torch.float32)
    batch = collate(random_rows(aligner, [3], contiguous=True))
    prompt = {name: batch[name] for name in ("input_ids", "position_ids")}
    slots = prompt | {"context_embeds": batch["context_embeds"], "gate_mode": "off"}
    text = prompt | {"input_ids": prompt["input_ids"].clamp(max=5)}
    assert 0 <= waits(lambda: prefill(aligner, slots)) - waits(lambda: prefill(base, text)) <= 1
    outputs = prefill(aligner, slots)
    new = {"input_ids": outputs.logits.argmax(dim=-1), "position_ids": prompt["position_ids"][:, -1:] + 1}
    cache = cache_of(outputs)
    decoded = waits(lambda: prefill(aligner, new | {"is_generated": True}, share(cache)))
    assert decoded <= waits(lambda: prefill(base, new, cache))
