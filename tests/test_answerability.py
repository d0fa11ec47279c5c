"""The answerability head: its inputs and logits, the output of a prefill, and how checkpoints store it."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest import mock

import pytest
import torch
from conftest import aligner_for, chat_inputs, edit_json, pipeline_of, processor_with
from golden import cases
from safetensors.torch import load_file, save_file
from tiny_models import BACKBONES, backbone_config, collate, for_generate, random_head, random_rows, tiny_aligner
from torch.nn.functional import pad
from transformers import LogitsProcessor

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.modeling_arcaligner import ArcAlignerModel, PrefillOutputs, SlotDecoderLayer

EXACT = {"rtol": 0, "atol": 1e-9}
TOKENS = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def aligner():
    """A random aligner in float64 whose head takes the states of the first two of three layers."""
    model = tiny_aligner("llama")
    random_head(model, [0, 1])
    return model


def left_padded(model, counts=(3, 5, 0), seed=0):
    """Prompts of several lengths, padded on the left."""
    batch = collate(random_rows(model, list(counts), seed=seed), "left")
    batch.pop("labels")
    return batch


def by_formula(head, states):
    """The regression on states, a list of (batch, hidden)."""
    return sum(layer_states @ weight for layer_states, weight in zip(states, head.weight, strict=True)) + head.bias


# Inputs and logits of the head


@pytest.mark.parametrize("gate_mode", ["off", "always"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_logits_are_the_regression(backbone, gate_mode, float64_model_code):
    """The head is a regression on the last token's states of its layers, for each backbone and gate mode."""
    model = tiny_aligner(backbone)
    random_head(model, [0, 1])
    batch = left_padded(model)
    with torch.no_grad():
        output = model(**batch, gate_mode=gate_mode, output_hidden_states=True)
    expected = by_formula(model.answerability_head, [layer_states[:, -1] for layer_states in output.hidden_states[1:3]])
    torch.testing.assert_close(output.answerability_logits, expected, **EXACT)


def test_last_layer_precedes_norm():
    model, seen = tiny_aligner("llama"), []
    random_head(model, [2])
    model.model.decoder_layers[2].register_forward_hook(lambda layer, inputs, states: seen.append(states))
    logits = model(**left_padded(model)).answerability_logits
    torch.testing.assert_close(logits, by_formula(model.answerability_head, [seen[0][:, -1]]), **EXACT)


@torch.no_grad()
def test_batch_equals_single_rows(aligner, float64_model_code):
    rows = random_rows(aligner, [3, 5, 0])
    batch = collate(rows, "left")
    together = aligner(**for_generate(batch), position_ids=batch["position_ids"]).answerability_logits
    alone = [aligner(**for_generate(collate([row]))).answerability_logits for row in rows]
    torch.testing.assert_close(together, torch.cat(alone), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("only", [False, True])
def test_cached_passages_equal_whole_prompt(processor, only):
    """The logits are those of the whole prompt if the passages are cached, so that the question has no slots."""
    model = aligner_for(processor, passage_attention="separate")
    random_head(model, [0, 1])
    question, documents = "Who wrote it?", ["It was written by Ada.", "Nobody read it."]
    store = model.passage_cache(processor_with(processor, passage_attention="separate"))
    for _ in range(2):  # computed, then cached
        inputs = store.prepare(question, documents)
        logits = store.prefill_suffix(inputs, only_answerability=only).answerability_logits
        expected = model(**chat_inputs(store.processor, question, documents)).answerability_logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # embeddings are float32


@torch.no_grad()
def test_only_answerability_skips_upper_layers(aligner):
    batch, run = left_padded(aligner), []
    expected = aligner(**batch)
    layers = aligner.model.decoder_layers
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: run.append(number))
    output = aligner(**batch, only_answerability=True)
    assert torch.equal(output.answerability_logits, expected.answerability_logits)
    assert {*run} == {0, 1} and output.logits is None and output.past_key_values is None


@torch.no_grad()
def test_threads_share_a_model(aligner):
    """Two threads get the logits of their own prompts, while both are between two layers."""
    batches, barrier = [left_padded(aligner, seed=seed) for seed in (1, 2)], Barrier(2)
    expected = [aligner(**batch).answerability_logits for batch in batches]
    forward = SlotDecoderLayer.forward

    def in_turns(layer, *args, **kwargs):
        barrier.wait(timeout=60)
        return forward(layer, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(SlotDecoderLayer, "forward", in_turns), ThreadPoolExecutor(2) as threads:
        results = [future.result() for future in [threads.submit(logits_of, aligner, batch) for batch in batches]]
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@torch.no_grad()
def logits_of(model, batch):
    return model(**batch).answerability_logits


@torch.no_grad()
def test_compiled_layers_give_states(aligner):
    batch = left_padded(aligner)
    expected = aligner(**batch).answerability_logits
    for layer in aligner.model.decoder_layers:
        layer.compile(backend="eager")
    torch.testing.assert_close(aligner(**batch).answerability_logits, expected, **EXACT)
    torch.testing.assert_close(aligner(**batch, only_answerability=True).answerability_logits, expected, **EXACT)


def test_training_computes_no_logits(aligner):
    """Neither training, with checkpointing or without, nor a generated token computes the logits."""
    batch = left_padded(aligner)
    cache = aligner(**batch, use_cache=True).past_key_values
    one = {"input_ids": batch["input_ids"][:, -1:], "is_generated": True}
    assert aligner(**one, past_key_values=cache).answerability_logits is None
    for is_checkpointed in (False, True):
        if is_checkpointed:
            aligner.gradient_checkpointing_enable()
        aligner.set_stage("grounding")
        aligner.train()
        output = aligner(**batch, labels=batch["input_ids"])
        output.loss.backward()
        assert output.answerability_logits is None and not aligner.answerability_head.weight.requires_grad
        aligner.eval()
        assert aligner(**batch).answerability_logits is not None


def test_head_changes_no_other_output():
    """A model with a head draws the same random weights, and computes the same."""
    models = [tiny_aligner("llama", answerability_layers=layers) for layers in (None, [0, 2])]
    batch = left_padded(models[0])
    outputs = [model(**batch) for model in models]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert outputs[0].answerability_logits is None and (outputs[1].answerability_logits == 0).all()
    plain, with_head = (model.state_dict() for model in models)
    names = [name for name in plain if "answerab" not in name]
    assert len(names) > 9 and all(torch.equal(plain[name], with_head[name]) for name in names)


def test_head_adds_match_score(aligner):
    """The match score is added to the logit of each beam; a row without words keeps its logit."""
    random_head(aligner, [0], match=(0.5, 3.0, -1.0))
    head, logits = aligner.answerability_head, torch.tensor([1.0, 2.0, 3.0, 4.0])
    actual = head.with_match(logits, [0.5, float("nan")])
    torch.testing.assert_close(actual, torch.tensor([0.5 + 1.5 - 1.0, 1.0 + 1.5 - 1.0, 3.0, 4.0]))
    assert torch.equal(head.with_match(logits, []), logits)
    random_head(aligner, [0])
    assert torch.equal(aligner.answerability_head.with_match(logits, [0.5, 0.7]), logits)  # not fitted


# The output of a prefill


class Watch(LogitsProcessor):
    """A logits processor that stores what the prefill has filled when it gets the first scores."""

    def __init__(self, prefill):
        self.prefill, self.seen = prefill, []

    def __call__(self, input_ids, scores):
        self.seen.append((self.prefill.answerability_logits, self.prefill.recursion_depth))
        return scores


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_generate_fills_prefill_before_scores(aligner, options, float64_model_code):
    batch = for_generate(left_padded(aligner, (3, 5)))
    expected, prefill = aligner(**batch), PrefillOutputs()
    watch = Watch(prefill)
    aligner.generate(**batch, **TOKENS | options, prefill=prefill, logits_processor=[watch])
    times = 2 if options else 1
    torch.testing.assert_close(
        prefill.answerability_logits, expected.answerability_logits.repeat_interleave(times), **EXACT
    )
    assert torch.equal(prefill.recursion_depth, expected.recursion_depth.repeat_interleave(times, dim=0))
    assert all(logits is prefill.answerability_logits for logits, *_ in watch.seen) and watch.seen[0][1] is not None


@torch.no_grad()
def test_assisted_decoding_reports_depths_only(aligner):
    """Assisted decoding reports no answerability, as its first run also contains candidate tokens."""
    batch = for_generate(left_padded(aligner, [4]))
    batch["input_ids"][0, -1] = batch["input_ids"][0, 2]
    prefill, depth = PrefillOutputs(), aligner(**batch).recursion_depth
    aligner.generate(**batch, **TOKENS, prompt_lookup_num_tokens=3, max_matching_ngram_size=1, prefill=prefill)
    assert torch.equal(prefill.recursion_depth, depth) and prefill.answerability_logits is None


@torch.no_grad()
def test_headless_prefill_reports_depths():
    model, prefill = tiny_aligner("llama"), PrefillOutputs()
    batch = for_generate(left_padded(model, (3, 5)))
    model.generate(**batch, **TOKENS, prefill=prefill)
    assert prefill.answerability_logits is None
    assert torch.equal(prefill.recursion_depth, model(**batch).recursion_depth)


# Checkpoints


@pytest.fixture
def saved(model, checkpoint_dir, tmp_path):
    """A checkpoint with a head, of an aligner around a base model."""
    random_head(model, [0, 2], threshold=0.25, match=(0.5, 3.0, -1.0))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def same_heads(loaded, expected):
    weights = [model.answerability_head.state_dict() for model in (loaded, expected)]
    settings = [{k: v for k, v in m.config.to_dict().items() if k.startswith("answer")} for m in (loaded, expected)]
    return settings[0] == settings[1] and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_saved_head_loads_in_float32(saved, model, dtype):
    loaded = ArcAlignerForCausalLM.from_pretrained(saved, dtype=dtype)
    assert same_heads(loaded, model)
    assert {buffer.dtype for buffer in loaded.answerability_head.buffers()} == {torch.float32}
    assert not any("answerability_head" in name for name, _ in loaded.aligner_parameters())


def test_bare_model_loads_without_head(saved, caplog):
    ArcAlignerModel.from_pretrained(saved)
    assert "answerability" not in caplog.text


def test_head_is_replaced_in_place(saved, model):
    """A head for other layers replaces the saved one, and nothing else in the checkpoint changes."""
    before = load_file(saved / "model.safetensors"), json.loads((saved / "config.json").read_text())
    random_head(model, [1], threshold=0.75)
    model.config.answer_calibration = [1.5, 0.5, 1.0]
    model.save_heads(saved)
    weights, config = load_file(saved / "model.safetensors"), json.loads((saved / "config.json").read_text())
    assert same_heads(ArcAlignerForCausalLM.from_pretrained(saved), model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before[0].items() if "answerability" not in name)
    assert {k for k in config if config[k] != before[1][k]} == {
        "answer_calibration",
        "answerability_layers",
        "answerability_threshold",
        "answerability_uses_match",
        "digests",
    }
    assert config["digests"]["model.safetensors"] == before[1]["digests"]["model.safetensors"]
    model.set_answerability_layers(None)
    model.save_heads(saved)
    assert ArcAlignerForCausalLM.from_pretrained(saved).answerability_head is None


def test_split_checkpoint_replaces_head(model, tmp_path):
    """The head is replaced in a checkpoint with its base model in several files."""
    model.save_pretrained(tmp_path, save_base_model=True, max_shard_size="20KB")
    random_head(model)
    model.save_heads(tmp_path)
    loaded = ArcAlignerForCausalLM.from_pretrained(tmp_path)
    assert same_heads(loaded, model) and (tmp_path / "model.safetensors.index.json").is_file()
    names = model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], model.state_dict()[name]) for name in names)


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if "answerability_head.weight" not in name}


def narrow_head(tensors):
    return tensors | {"answerability_head.weight": tensors["answerability_head.weight"][:, 1:].contiguous()}


def another_head(tensors):
    return tensors | {"answerability_head.bias": tensors["answerability_head.bias"] + 1}


@pytest.mark.parametrize(
    "change, settings, message",
    [
        (without_head, {}, "lacks 1 of the .* aligner weights .* first `answerability_head.weight`"),
        (narrow_head, {}, "`answerability_head.weight` has shape"),
        (another_head, {}, "do not match their digest"),
        (
            dict,
            {"answerability_layers": None},
            "has 3 aligner weights that a model with the settings .* does not have.* `answerability_layers`",
        ),
        (dict, {"answerability_layers": [0]}, "`answerability_head.weight` has shape"),
        (dict, {"answerability_layers": [2, 0]}, "`answerability_layers` is .*ascending order"),
        (dict, {"answerability_layers": [0, 3]}, "`answerability_layers` is .* layer numbers from 0 to 2"),
    ],
)
def test_mismatched_head_is_refused(saved, change, settings, message):
    save_file(change(load_file(saved / "model.safetensors")), saved / "model.safetensors", {"format": "pt"})
    edit_json(saved / "config.json", **settings)
    with pytest.raises(ValueError, match=message):
        ArcAlignerForCausalLM.from_pretrained(saved)


def test_unknown_layers_are_refused(aligner):
    for layers in ([], [-1], [0, 0], [3]):
        with pytest.raises(ValueError, match="`answerability_layers` is"):
            ArcAlignerConfig(text_config=backbone_config("llama"), answerability_layers=layers)
        with pytest.raises(ValueError, match="`answerability_layers` is"):
            aligner.set_answerability_layers(layers)
    aligner.set_answerability_layers(None)
    with pytest.raises(ValueError, match="`only_answerability` needs an answerability head"):
        aligner(**left_padded(aligner), only_answerability=True)


# Checkpoints of version 0.2, which store the head in the processor's file


def test_old_checkpoint_has_a_head():
    probe = json.loads((cases.SAVED / "separate" / "processor_config.json").read_text())["answer_probe"]
    with cases.tiny_models():
        model = ArcAlignerForCausalLM.from_pretrained(cases.SAVED / "separate")
        assert ArcAlignerForCausalLM.from_pretrained(cases.SAVED / "joint").answerability_head is None
    head, config = model.answerability_head, model.config
    assert head.weight.flatten().tolist() == pytest.approx(probe["weight"]) and config.answerability_layers == [0, 2]
    assert head.bias.item() == pytest.approx(0.1) and head.match.tolist() == pytest.approx([0.7, 2.0, -1.0])
    assert config.answerability_uses_match and config.answerability_threshold == 0.5


def test_processor_ignores_old_probe(caplog):
    """The processor drops the `answer_probe` of an old file without a warning, and does not save it."""
    with cases.tiny_models():
        processor = ArcAlignerProcessor.from_pretrained(cases.SAVED / "separate")
    assert "answer_probe" not in processor.to_dict() and "answer_probe" not in caplog.text


def test_unordered_old_probe_is_sorted(checkpoint_dir, tmp_path):
    folder, width = copy_with_probe(checkpoint_dir, tmp_path, layers=[2, 0]), 32
    model = ArcAlignerForCausalLM.from_pretrained(folder)
    weight = torch.arange(2.0 * width)
    assert model.config.answerability_layers == [0, 2] and not model.config.answerability_uses_match
    assert torch.equal(model.answerability_head.weight, torch.stack([weight[width:], weight[:width]]))
    assert model.answerability_head.match.tolist() == [1.0, 0.0, 0.0]


def test_old_checkpoint_is_converted(tmp_path):
    """Only the head moves; the files of encoder and tokenizer and their digests do not change."""
    folder = shutil.copytree(cases.SAVED / "separate", tmp_path / "old")
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.name not in CHANGED and path.is_file()}
    digests = json.loads((folder / "config.json").read_text())["digests"]
    with cases.tiny_models():
        model = ArcAlignerForCausalLM.from_pretrained(folder)
        model.save_heads(folder)
        assert "answer_probe" not in (folder / "processor_config.json").read_text()
        assert same_heads(ArcAlignerForCausalLM.from_pretrained(folder), model)
        assert ArcAlignerProcessor.from_pretrained(folder).no_answer == "not in the text"
    converted = json.loads((folder / "config.json").read_text())["digests"]
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert {name: digest for name, digest in digests.items() if isinstance(digest, str)}.items() < converted.items()
    assert converted.keys() - digests.keys() == {"answerability_head"}


CHANGED = ("model.safetensors", "config.json", "processor_config.json")


@pytest.mark.parametrize("changes", [{"layers": [0, 9]}, {"weight": [0.5] * 7}, {"layers": None}, {"bias": "a"}])
def test_foreign_old_probe_is_refused(checkpoint_dir, tmp_path, changes):
    with pytest.raises(ValueError, match="`answer_probe` in .* cannot be used .* Fit it again"):
        ArcAlignerForCausalLM.from_pretrained(copy_with_probe(checkpoint_dir, tmp_path, **changes))


def copy_with_probe(checkpoint_dir, tmp_path, **changes):
    """A copy of the checkpoint with an `answer_probe`."""
    folder = shutil.copytree(checkpoint_dir, tmp_path / "old")
    probe = {"layers": [0, 2], "weight": list(map(float, range(64))), "bias": 0.1, "threshold": 0.5} | changes
    edit_json(folder / "processor_config.json", answer_probe=probe)
    return folder


# How likely it is that an answer is right


ASKED = {"question": "Who wrote it?", "documents": ["It was written by Ada.", "Bob read it."]}


def test_likelihood_covers_chosen_tokens(separate, monkeypatch):
    """The likelihood is calibrated from answerability and mean log-likelihood of the tokens, without copy bonus."""
    model, processor = separate
    model.config.answer_calibration, ask = [1.5, 0.5, 1.0], pipeline_of(model, processor)
    monkeypatch.setattr(type(ask.answerer), "can_weight", False)
    for copy_bonus in (0.0, 8.0):
        settings = {"max_new_tokens": 6, "copy_bonus": copy_bonus, "max_passages": 2}
        (record,) = ask(ASKED, return_slots=True, **settings)
        inputs = chat_inputs(processor, ASKED["question"], ASKED["documents"])
        with torch.no_grad():
            ids = pipeline_ids(ask, settings)
            new = ids.shape[1] - inputs["input_ids"].shape[1]
            inputs |= {"input_ids": ids, "attention_mask": pad(inputs["attention_mask"], (0, new), value=1)}
            log_probs = model(**inputs).logits[0, -new - 1 : -1].float().log_softmax(dim=-1)
        mean = log_probs.gather(1, ids[0, -new:, None]).mean()
        sure = record["statistics"]["answerability"]
        expected = torch.sigmoid(1.5 * mean + 0.5 * torch.logit(torch.tensor(sure)) + 1.0).item()
        assert record["statistics"]["answer_likelihood"] == pytest.approx(expected, abs=1e-5)


def pipeline_ids(ask, settings) -> torch.LongTensor:
    """Ids of the prompt and the answer (1, seq_len) in the pipeline."""
    outputs, generate = [], ask.model.generate
    with mock.patch.object(ask.model, "generate", lambda **kwargs: outputs.append(generate(**kwargs)) or outputs[0]):
        ask(ASKED, **settings)
    return outputs[0]


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 2}, {"min_confidence": 1.0}])
def test_likelihood_needs_greedy_answers(separate, options):
    """Answers from sampling or beam search have no likelihood, and neither have abstentions."""
    separate[0].config.answer_calibration = [1.5, 0.5, 1.0]
    (record,) = pipeline_of(*separate)(ASKED, return_slots=True, max_new_tokens=3, **options)
    assert "answer_likelihood" not in record["statistics"] and "answerability" in record["statistics"]


def test_no_likelihood_without_calibration(separate):
    (record,) = pipeline_of(*separate)(ASKED, return_slots=True, max_new_tokens=3)
    assert "answer_likelihood" not in record["statistics"]
    with pytest.raises(ValueError, match="`answer_calibration` is .*; expected the three numbers that .* or None"):
        ArcAlignerConfig(answer_calibration=[1.0])
