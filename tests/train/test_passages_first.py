"""A step in two phases equals a step in one, and its attention loss rewards attention to passages with the answer."""

import pytest
import torch
from conftest import random_aligner
from datasets import Dataset
from training_recipes import logs, run
from training_rows import PASSAGES, question_rows
from transformers.modeling_outputs import BaseModelOutputWithPast

from arcaligner.attention_arcaligner import place_passage_ids
from arcaligner.train.examples import EXAMPLE_FEATURES, ExampleBuilder
from arcaligner.train.passages_first import (
    AttentionLoss,
    PassagesFirstCollator,
    run_passages_first,
    turns_mask,
)
from arcaligner.train.sft import AlignerTrainer, AlignerTrainingConfig, ContextCollator, encode_slots, turn_mask


def examples(processor, count=4):
    """Questions about one to three passages; the answer, the last word of a passage, stands in its own passage only."""
    built = []
    for number, row in enumerate(question_rows(count)):
        others = [{"title": title, "text": text} for title, text in PASSAGES if text != row["passages"][0]["text"]]
        row |= {"passages": [*others[: number % 3], *row["passages"]]}
        built += ExampleBuilder(processor).question_examples([row])
    built[0]["turns"] = built[0]["turns"] * 2  # side by side
    return built


@pytest.fixture(params=["start", "end"])
def aligner(base_model_dir, processor, float64_model_code, request):
    """An aligner of independent passages with random weights, whose attention returns its weights."""
    settings = {"passage_attention": "separate", "word_parts": 2, "attn_implementation": "eager", "lora_dropout": 0.0}
    settings["passage_alignment"] = request.param
    return random_aligner(base_model_dir, processor, 0, **settings).double().train()


def two_phases(aligner, processor, rows, rate, **settings):
    tokens = (processor.encoder.text_tokenizer, (rate,), True)
    batch = PassagesFirstCollator(processor.context_token_id, processor.tokenizer, *tokens)(rows)
    slots = encode_slots(aligner.config, processor, batch)
    return batch, *run_passages_first(aligner, batch, slots, **settings)


def one_phase(aligner, processor, rows, rate, **settings):
    """The batch and the outputs with all parts of an example in one row, under a mask."""
    tokens = (processor.encoder.text_tokenizer, (rate,), True)
    batch = ContextCollator(processor.context_token_id, 0, *tokens)(rows)
    slots = encode_slots(aligner.config, processor, batch)
    is_slot = batch["input_ids"] == processor.context_token_id
    placed = place_passage_ids(is_slot, batch["context_passage_ids"])
    mask, position_ids = turn_mask(batch["turn_ids"], placed, aligner.dtype)
    ids, labels = batch["input_ids"], batch["labels"]
    options = {"attention_mask": mask, "position_ids": position_ids, "labels": labels, "use_cache": False}
    return batch | {"placed": placed}, aligner(ids, **options, **slots, **settings)


def gradients(aligner, loss):
    aligner.zero_grad()
    loss.backward()
    parameters = aligner.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


@pytest.mark.parametrize("stage", ["grounding", "gating"])
@pytest.mark.parametrize("rate", [2, "segment"])
def test_two_phases_are_one(aligner, processor, stage, rate):
    """Loss and gradients of two phases are those of one, with several passages and turns and with gates."""
    aligner.set_stage(stage)
    rows = examples(processor)
    _, outputs, _ = two_phases(aligner, processor, rows, rate)
    _, expected = one_phase(aligner, processor, rows, rate)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-9, atol=1e-9)
    computed, wanted = gradients(aligner, outputs.loss), gradients(aligner, expected.loss)
    assert any("lora_A" in name and gradient.abs().max() > 1e-6 for name, gradient in computed.items())
    # Nothing uses the states of slots after the last layer.
    unused = [wanted.pop(name) for name in wanted.keys() - computed.keys()]
    assert all(not gradient.any() for gradient in unused)
    torch.testing.assert_close(computed, wanted, rtol=1e-7, atol=1e-9)


def test_items_divide_the_loss(aligner, processor):
    rows = examples(processor)
    batch, outputs, _ = two_phases(aligner, processor, rows, 2, num_items_in_batch=100)
    _, expected, _ = two_phases(aligner, processor, rows, 2)
    torch.testing.assert_close(outputs.loss * 100, expected.loss * (batch["labels"][:, 1:] >= 0).sum())


def test_turns_have_logits(aligner, processor):
    """The logits at turns are those of one phase."""
    rows = examples(processor)
    batch, outputs, _ = two_phases(aligner, processor, rows, 2, with_logits=True)
    one, expected = one_phase(aligner, processor, rows, 2)
    is_turn = batch["turn_ids"] >= 0  # 0, 1, ... here, and from 1 on behind the slots of a row
    assert outputs.logits.shape == (*is_turn.shape, aligner.config.text_config.vocab_size)
    torch.testing.assert_close(outputs.logits[is_turn], expected.logits[one["turn_ids"] > 0], rtol=1e-7, atol=1e-9)


def test_predictions_are_logits_of_turns(tmp_path, aligner, processor):
    """`predict` of a trainer gives logits and labels of all rows of turns, two of them of the first example."""
    rows = examples(processor)
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_eval_batch_size": 4}
    trainer = AlignerTrainer(
        aligner,
        stage="grounding",
        args=AlignerTrainingConfig(str(tmp_path), **settings),
        data_collator=PassagesFirstCollator(
            processor.context_token_id, processor.tokenizer, processor.encoder.text_tokenizer, (2,), True
        ),
        train_dataset=Dataset.from_list(rows, features=EXAMPLE_FEATURES),
        processing_class=processor,
    )
    predicted = trainer.predict(trainer.train_dataset)
    logits, labels = torch.tensor(predicted.predictions)[:, :-1], torch.tensor(predicted.label_ids)[:, 1:]
    assert len(logits) == len(labels) == len(rows) + 1
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(predicted.metrics["test_loss"], abs=1e-4)


def collated(processor, rows):
    return PassagesFirstCollator(processor.context_token_id, processor.tokenizer, processor.encoder.text_tokenizer)(
        rows
    )


def test_slots_with_the_answer(processor):
    """A batch marks the slots of passages that contain the answer."""
    rows = examples(processor, 3)  # about one, two and three passages, the answering one last
    rows[0]["turns"] = rows[0]["turns"][:1]
    batch = collated(processor, rows)
    for number, row in enumerate(rows):
        documents = [segment["document"] for segment in row["segments"]]  # a slot each
        held = [number > 0 and document == max(documents) for document in documents]
        length = len(row["head"])
        for turn in range(len(row["turns"])):
            assert batch["holds_answer"][number, turn, length : length + len(held)].tolist() == held
        assert not batch["holds_answer"][number, :, :length].any()
        assert batch["is_slot"][number].sum() == len(documents)


def test_short_passages_share_rows(processor):
    """No row is longer than the longest passage, and each slot keeps its place."""
    rows = examples(processor, 6)
    batch = collated(processor, rows)
    num_passages = sum(len({segment["document"] for segment in row["segments"]}) for row in rows)
    assert len(batch["passage_ids"]) < num_passages
    is_slot = batch["passage_ids"] == processor.context_token_id
    assert (batch["context_passage_ids"] >= 0).sum() == is_slot.sum() == sum(len(row["segments"]) for row in rows)
    flat = is_slot.flatten()
    kept = batch["prefix_positions"][0][batch["is_slot"][0]]
    assert flat[kept].all() and len(kept.unique()) == len(kept)


def test_long_turns_have_their_rows(processor):
    """Rows are as long as the longest turn, and all rows of an example attend to the same passages."""
    rows = examples(processor, 2)
    batch = collated(processor, rows)
    longest = max(len(turn["input_ids"]) for row in rows for turn in row["turns"])
    assert batch["input_ids"].shape == (3, longest)
    assert batch["turn_ids"].amax(dim=1).tolist() == [0, 0, 0]
    torch.testing.assert_close(batch["prefix_positions"][0], batch["prefix_positions"][1])


@pytest.mark.parametrize("aligner", ["start"], indirect=True)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_loss_is_the_share(aligner, processor, kernel):
    """The attention loss is computed from the attention weights of a step in one phase, with both kernels."""
    rows, layers = examples(processor), [1]
    batch, outputs = one_phase(aligner, processor, rows, 2, output_attentions=True)
    aligner.set_attn_implementation(kernel)
    _, _, loss = two_phases(aligner, processor, rows, 2, attention_layers=layers)
    wanted = []
    for number in range(len(rows)):
        placed, labels, turns = (batch[name][number] for name in ("placed", "labels", "turn_ids"))
        last = int(placed.max())
        if last == 0:  # nothing to choose
            continue
        for at in range(len(labels) - 1):
            if labels[at + 1] >= 0 and turns[at] == turns[at + 1]:
                attention = outputs.attentions[layers[0]][number, :, at].sum(dim=0)
                to_all, to_last = attention[placed >= 0].sum(), attention[placed == last].sum()
                wanted.append(torch.log(to_all + 1e-4) - torch.log(to_last + 1e-4))
    assert len(wanted) > 4
    torch.testing.assert_close(loss, torch.stack(wanted).mean(), rtol=1e-4, atol=1e-5)


def test_kernels_have_equal_gradients(aligner, processor):
    """Both losses and their gradients are the same with `eager` and `sdpa`."""
    aligner.set_stage("grounding")
    found = []
    for kernel in ("eager", "sdpa"):
        aligner.set_attn_implementation(kernel)
        _, outputs, loss = two_phases(aligner, processor, examples(processor), 2, attention_layers=[0, 1])
        found.append((outputs.loss, loss, gradients(aligner, outputs.loss + loss)))
        assert aligner.config.text_config._attn_implementation == kernel
    assert any("lora_A" in name and gradient.abs().max() > 1e-6 for name, gradient in found[0][2].items())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)  # `eager` has a float32 softmax


def test_kernel_is_restored(aligner, processor, monkeypatch):
    """A forward that fails leaves the model with its own kernel."""
    aligner.set_attn_implementation("sdpa")
    monkeypatch.setattr(AttentionLoss, "add_layer", None)
    with pytest.raises(TypeError):
        two_phases(aligner, processor, examples(processor), 2, attention_layers=[0])
    assert aligner.config.text_config._attn_implementation == "sdpa"


def test_no_choice_no_attention_loss():
    batch = {
        "turn_ids": torch.tensor([[0, 0]]),
        "labels": torch.tensor([[-100, 3]]),
        "prefix_positions": torch.tensor([[0, 1]]),
    }
    batch |= {"is_slot": torch.tensor([[False, True]]), "holds_answer": torch.zeros(1, 1, 2, dtype=torch.bool)}
    assert AttentionLoss(batch, [0]).value(BaseModelOutputWithPast(attentions=[torch.full((1, 1, 2, 4), 0.25)])) is None


def test_turns_read_prompt_and_themselves():
    mask = turns_mask(torch.tensor([[0, 0, 1, -1]]), torch.tensor([[5, 6, -1]]), torch.float32)
    reads = [[1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]]
    assert (mask == 0).int().tolist() == [[reads]]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_recipe_trains_passages_first(tmp_path, write_recipe, kernel):
    aligner = {"lora_r": 4, "gate_hidden_size": 8, "passage_attention": "separate", "word_parts": 2}
    keys = {"aligner": aligner, "passages_first": True, "distractors": 1.0, "attn_implementation": kernel}
    keys |= {"attention_loss_weight": 0.3, "attention_loss_layers": [1], "logging_steps": 1}
    run(write_recipe("grounding", tmp_path / "run", **keys))
    assert len(logs(tmp_path / "run", "attention_loss")) == 4


LOSS = {
    "aligner": {"lora_r": 4, "passage_attention": "separate"},
    "passages_first": True,
    "attention_loss_weight": 0.3,
}


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"attention_loss_weight": 0.3}, "Set `passages_first: true`"),
        ({"attention_loss_weight": 0.3, "passages_first": True}, "but `attention_loss_layers` is empty"),
        (LOSS | {"attention_loss_layers": [1], "attn_implementation": "sdpa", "compile_layers": True}, "`eager`"),
        (LOSS | {"attention_loss_layers": [1, 99]}, "from 0 to 2, in"),
        (LOSS | {"attention_loss_layers": [-1]}, "from 0 to 2, in"),
        (
            {"passages_first": True, "aligner": {"lora_r": 4, "passage_attention": "joint"}},
            "do not attend to each other",
        ),
        (
            {
                "passages_first": True,
                "aligner": {"lora_r": 4, "passage_attention": "separate"},
                "gradient_checkpointing": True,
            },
            "no keys and values are stored",
        ),
    ],
)
def test_keys_that_do_not_fit(tmp_path, write_recipe, keys, message):
    """Keys that do not fit two phases are refused."""
    with pytest.raises(ValueError, match=message):
        run(write_recipe("grounding", tmp_path / "run", **keys))
