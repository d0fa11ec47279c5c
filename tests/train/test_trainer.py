"""From examples to the loss: one rate in each batch, turns side by side, logs, and rows in errors."""

import copy
import math
import pickle
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from peft.tuners.lora import LoraLayer
from tiny_models import float64_throughout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from training_recipes import COMPARED, logs, parameters, parse, run
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor, encoder_arcaligner
from arcaligner.encoder_arcaligner import EncoderInputs, SentenceEncoder
from arcaligner.train import sft as module
from arcaligner.train.examples import EXAMPLE_FEATURES, ExampleBuilder, ExampleSelector
from arcaligner.train.sft import (
    AlignerTrainer,
    AlignerTrainingConfig,
    ContextCollator,
    encode_slots,
    swapped_slots,
    turn_mask,
)
from arcaligner.train.validate import target_losses

SLOT, PAD = 99, 7


def row(row_id, num_words, num_turns=1):
    """An example as 🤗 Datasets returns it: a segment of one-character words after a title of three characters."""
    turns = [{"input_ids": [20 + n, 30 + n], "labels": [-100, 30 + n]} for n in range(num_turns)]
    segment = {"document": 0, "encoder_text": "T: " + "w" * num_words, "encoder_start": 3}
    segment |= {"word_ids": list(range(num_words)), "word_ends": list(range(1, num_words + 1))}
    return {"row_id": row_id, "head": [1, 2], "turns": turns, "segments": [segment]}


@pytest.fixture
def collate(processor):
    """Makes a batch of rows at one of the rates."""
    tokenizer = processor.encoder.text_tokenizer
    return lambda rows, rates=("segment",), **settings: ContextCollator(SLOT, PAD, tokenizer, rates, **settings)(rows)


def examples_of(processor, count):
    builder = ExampleBuilder(processor)
    return [example for record in question_rows(count) for example in builder.question_examples([record])]


# Batches


def test_batch_is_padded_and_numbered(collate):
    """Rows are padded, and `turn_ids` number the turns."""
    batch = collate([row("x", 2, num_turns=2), row("y", 4)], context_words=True)
    expected = {
        "input_ids": torch.tensor([[1, 2, SLOT, 20, 30, 21, 31], [1, 2, SLOT, 20, 30, PAD, PAD]]),
        "labels": torch.tensor([[-100, -100, -100, -100, 30, -100, 31], [-100, -100, -100, -100, 30, -100, -100]]),
        "turn_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, -1, -1]]),
        "context_word_ids": torch.tensor([[[0, 1, -1, -1]], [[0, 1, 2, 3]]]),
        "context_passage_ids": torch.tensor([[0], [0]]),
    }
    for key, tensor in expected.items():
        assert torch.equal(batch.pop(key), tensor), key
    assert batch.pop("encoder_inputs").num_slots == 2
    assert batch == {"max_turns": 2, "row_ids": ["x", "y"]}


def slots_of(batch) -> list[int]:
    """The number of slots of each row."""
    return (batch["input_ids"] == SLOT).sum(dim=1).tolist()


def test_rate_cuts_segments(collate):
    """A rate cuts segments into slots with their words."""
    batch = collate([row("x", 6), row("y", 3)], rates=(3,), context_words=True)
    assert slots_of(batch) == (batch["context_passage_ids"] >= 0).sum(dim=1).tolist() == [2, 1]
    assert sorted(set(batch["encoder_inputs"].slots.tolist())) == [0, 1, 2]  # the fourth place is padding
    assert torch.equal(batch["context_word_ids"], torch.tensor([[[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [-1, -1, -1]]]))
    segment = {"document": 0, "encoder_text": "", "encoder_start": 0, "word_ids": [], "word_ends": []}  # of no text
    batch = collate([row("y", 0) | {"segments": [segment]}], rates=(2,))
    assert slots_of(batch) == [1] and batch["encoder_inputs"].slots.tolist() == [0]


def test_ids_decide_the_rate(collate):
    """The ids of the rows decide the rate, and each rate occurs."""
    rates = (1, 2, "segment")
    once, again, more_turns = (
        [slots_of(collate([row(f"{n}", 4, turns), row("y", 4)], rates))[0] for n in range(40)] for turns in (1, 1, 2)
    )
    assert once == again == more_turns and set(once) == {4, 2, 1}


def test_batch_slots_equal_inference(processor, model, monkeypatch):
    """Embeddings and words are those of `encode_documents`, however many texts are encoded at once."""
    monkeypatch.setattr("arcaligner.encoder_arcaligner.CPU_TOKENS", 40)
    rows, tokenizer = examples_of(processor, 3), processor.encoder.text_tokenizer
    for rate in ("segment", 4):
        batch = ContextCollator(processor.context_token_id, PAD, tokenizer, (rate,), context_words=True)(rows)
        assert len(batch["encoder_inputs"].batches) > 1
        embeds = encode_slots(model.config, processor, batch)["context_embeds"]
        for number, (row_embeds, question) in enumerate(zip(embeds, question_rows(3), strict=True)):
            expected = processor.encode_documents(question["passages"], tokens_per_slot=rate)
            count = len(expected.context_embeds)
            torch.testing.assert_close(row_embeds[:count], expected.context_embeds, rtol=1e-5, atol=1e-6)
            assert not row_embeds[count:].any()
            words = [segment["word_ids"] for segment in rows[number]["segments"]]
            word_ids = batch["context_word_ids"][number]
            assert word_ids[word_ids >= 0].tolist() == [word for segment_words in words for word in segment_words]


def test_batch_has_no_nested_lists(collate):
    """A batch has tensors, numbers, encoder inputs and row ids only, and all tensors are moved to the device."""
    batch = collate([row("x", 6, 2), row("y", 3)], rates=(3,), context_words=True)
    assert {type(value) for key, value in batch.items() if key != "row_ids"} == {torch.Tensor, int, EncoderInputs}
    moved = send_to_device(batch, "meta")
    inputs = moved.pop("encoder_inputs")
    tensors = [value for value in (*moved.values(), *vars(inputs).values()) if torch.is_tensor(value)]
    assert len(tensors) == 9 and all(tensor.is_meta for tensor in tensors)
    assert moved["row_ids"] == ["x", "y"]


def test_workers_make_equal_batches(processor):
    """Worker processes make the same batches, also from a pickled collator."""
    rows = examples_of(processor, 4)
    collator = ContextCollator(processor.context_token_id, PAD, processor.encoder.text_tokenizer, (2, 4, "segment"))
    sent = pickle.loads(pickle.dumps(collator))
    batches = DataLoader(rows, batch_size=2, num_workers=1, collate_fn=sent)
    for start, batch in zip((0, 2), batches, strict=True):
        expected = collator(rows[start : start + 2])
        assert batch.pop("row_ids") == expected.pop("row_ids")
        batch_inputs, inputs = (vars(collated.pop("encoder_inputs")) for collated in (batch, expected))
        torch.testing.assert_close(batch | batch_inputs, expected | inputs, rtol=0, atol=0)


# Turns


def test_turns_continue_after_the_longest():
    """Turns after independent passages continue after the longest one."""
    turn_ids, passage_ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2]]), torch.tensor([[-1, 0, 0, 1, 2, -1, -1, -1]])
    assert turn_mask(turn_ids, passage_ids, torch.float32)[1].tolist() == [[0, 1, 2, 1, 1, 3, 4, 3]]


# What is logged


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> dict:
    path = write_rows(tmp_path_factory.mktemp("held_out") / "questions.jsonl", question_rows(7))
    return {"eval_files": {path: 1.0}, "eval_strategy": "steps", "eval_steps": 2}


def test_perplexity_over_all_targets(tmp_path, write_recipe, held_out):
    """Perplexity and gap are over all targets, and do not depend on the batch size."""
    logged = []
    # Rows are evaluated in their order.
    keys = {"train_sampling_strategy": "random", "max_steps": 2, "eval_slot_gap": True, **held_out}
    for batch_size in (2, 7):
        arguments = write_recipe("grounding", tmp_path / str(batch_size), per_device_eval_batch_size=batch_size, **keys)
        run(arguments)
        logged += logs(tmp_path / str(batch_size), "eval_slot_gap")
    assert logged[0]["eval_perplexity"] == pytest.approx(logged[1]["eval_perplexity"], rel=1e-5)
    recipe, args, _ = parse(arguments)
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path / "7").eval()
    processor = ArcAlignerProcessor.from_pretrained(tmp_path / "7")
    rows = list(ExampleSelector(recipe, ExampleBuilder(processor), args.seed).eval_examples())
    nll = []
    for examples in (rows, swapped_slots(rows)):
        loss, tokens = target_losses(model, processor, examples, "segment").sum(axis=0)
        nll.append(loss / tokens)
    assert logged[1]["eval_perplexity"] == pytest.approx(math.exp(nll[0]), rel=1e-5)
    assert logged[1]["eval_slot_gap"] == pytest.approx(nll[1] - nll[0], abs=1e-5)
    assert abs(nll[1] - nll[0]) > 1e-5


def test_swapped_slots():
    """Swapped slots are those of the next row that has other passages."""
    rows = [{"row_id": name, "segments": segments} for name, segments in zip("abcd", ["x", "x", "y", "z"], strict=True)]
    swapped = [(example["row_id"], example["segments"]) for example in swapped_slots(rows)]
    assert swapped == [*zip("abcd", "yyzx", strict=True)]
    assert swapped_slots(rows[:2]) == rows[:2]


def test_best_checkpoint_is_the_result(tmp_path, write_recipe, held_out, monkeypatch):
    """The best checkpoint is kept, and is the result of the stage."""
    losses = iter([5.0, 1.0, 3.0])
    monkeypatch.setattr(module, "_mean", lambda pair: math.log(next(losses)))
    keys = {"save_total_limit": 1, "max_steps": 6, **held_out}
    keys |= {"metric_for_best_model": "eval_perplexity", "greater_is_better": False, "load_best_model_at_end": True}
    run(write_recipe("grounding", tmp_path / "run", **keys))
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-4"}
    best, final = parameters(tmp_path / "run" / "checkpoint-4"), parameters(tmp_path / "run")
    torch.testing.assert_close(final, best, rtol=0, atol=0)


# The loss


@pytest.fixture
def trainer(tmp_path, processor, model):
    """A trainer with two batches of questions."""
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 4, "max_steps": 2}
    return AlignerTrainer(
        model,
        stage="grounding",
        args=AlignerTrainingConfig(str(tmp_path / "run"), **settings),
        data_collator=ContextCollator(
            processor.context_token_id, processor.tokenizer.pad_token_id, processor.encoder.text_tokenizer
        ),
        train_dataset=Dataset.from_list(examples_of(processor, 8), features=EXAMPLE_FEATURES),
        processing_class=processor,
    )


def test_predictions_are_logits(trainer):
    """`predict` and `compute_metrics` get logits and labels of all rows, and the loss equals that of an evaluation."""
    dataset, seen = trainer.train_dataset, []
    expected = trainer.evaluate(dataset)
    predicted = trainer.predict(dataset)
    logits, labels = torch.tensor(predicted.predictions)[:, :-1], torch.tensor(predicted.label_ids)[:, 1:]
    assert len(logits) == len(labels) == len(dataset)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(math.log(expected["eval_perplexity"]), abs=1e-4)
    trainer.compute_metrics = lambda prediction: seen.append(prediction) or {"rows": len(prediction.predictions)}
    metrics = trainer.evaluate(dataset)
    assert metrics["eval_rows"] == len(dataset) and metrics["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert (seen[0].label_ids == predicted.label_ids).all()


def test_loss_equals_whole_model(trainer):
    batch = trainer.data_collator(list(trainer.train_dataset))
    inputs = {"attention_mask": (batch["turn_ids"] >= 0).long(), "labels": batch["labels"]}
    inputs |= encode_slots(trainer.model.config, trainer.processing_class, batch)
    trainer.model.eval()
    expected = trainer.model(batch["input_ids"], **inputs).loss
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=100)
    torch.testing.assert_close(loss, expected * (batch["labels"] != -100).sum() / 100)


class Waits(TorchDispatchMode):
    """Records where the host waits for a device: in a function of this project, or in the model that it calls."""

    ASKING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select}
    OURS = {module.__file__, encoder_arcaligner.__file__}
    PROJECT = Path(module.__file__).parents[1]

    def __init__(self):
        super().__init__()
        self.places, self.functions = [], []  # `functions` has those of the project, the models' too

    def note(self) -> None:
        frames = traceback.extract_stack()
        last = max((number for number, frame in enumerate(frames) if frame.filename in self.OURS), default=0)
        models = [name for frame in frames[last:] if (name := Path(frame.filename).name).startswith("modeling_")]
        self.places.append([*models, frames[last].name][0])
        folders = (self.PROJECT, self.PROJECT / "train")
        project = [frame.name for frame in frames if Path(frame.filename).parent in folders]
        self.functions.append(project[-1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        of_index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_)
        has_mask = of_index and any(index is not None and index.dtype == torch.bool for index in args[1])
        if func.overloadpacket in self.ASKING or has_mask:
            self.note()
        return func(*args, **(kwargs or {}))


def test_step_synchronizes_once(trainer, monkeypatch):
    """The trainer waits once, for whether loss and gradients are finite; the model waits for the places of slots and of
    targets only. Ids are checked on a CPU only."""
    waits, batch = Waits(), trainer.data_collator(list(trainer.train_dataset)[:2])
    for name in ("tolist", "cpu", "numpy"):  # no operations where the device is the CPU
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, plain=plain, **kwargs: waits.note() or plain(*args, **kwargs)
        )
    trainer.model.train()
    with waits:
        trainer.compute_loss(trainer.model, batch).backward()
        trainer.check_gradients()
    monkeypatch.undo()
    assert [place for place in waits.places if not place.startswith("modeling_")] == ["check_finite"]
    of_libraries = {"encode_inputs", "forward"}  # these call a model of transformers, which may inspect its mask
    functions = [name for name in waits.functions if name not in {"check_ids", *of_libraries}]
    assert functions == ["_to_numpy_in_one_sync", "targets_loss", "check_finite"]


def test_untrained_encoder_has_no_lora(tmp_path, trainer, processor, monkeypatch):
    """An encoder that is not trained has no LoRA and no gradient: the LoRA of an earlier stage is merged."""
    trained = copy.deepcopy(processor)
    trained.encoder = SentenceEncoder(processor.encoder_name_or_path)
    for weight in trained.train_encoder(lora_r=2):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    trained.save_pretrained(tmp_path / "trained")
    trainer.processing_class = ArcAlignerProcessor.from_pretrained(tmp_path / "trained")
    layers = [module for module in trainer.processing_class.encoder.model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.lora_A["default"].register_forward_hook(lambda *_: pytest.fail("LoRA is computed"))
    seen, encode = [], SentenceEncoder.encode_inputs

    def watched(self, inputs):
        seen.append(torch.is_grad_enabled())
        return encode(self, inputs)

    monkeypatch.setattr(SentenceEncoder, "encode_inputs", watched)
    trainer.model.train()
    trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)[:2])).backward()
    assert layers and seen == [False]


def test_accumulated_rows_equal_a_batch(tmp_path, write_recipe):
    """Accumulated rows equal a batch, also with different numbers of labels and slots."""
    for size in (1, 4):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        run(write_recipe("grounding", tmp_path / str(size), **COMPARED, **sizes))
    torch.testing.assert_close(*(parameters(tmp_path / size) for size in "14"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate_mode", ["off", "adaptive"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_turns_equal_single_ones(trainer, processor, gate_mode, attention):
    """Packed turns have the logits and the loss of single turns."""
    model = trainer.model.double().eval()
    model.set_attn_implementation(attention)
    model.config.gate_mode, trainer.skip_logits = gate_mode, False
    rows = [record | {"passages": question_rows(1)[0]["passages"]} for record in question_rows(3)]
    (together,) = ExampleBuilder(processor).question_examples(rows)
    apart = [together | {"row_id": f"{number}", "turns": [turn]} for number, turn in enumerate(together["turns"])]
    # The encoder is in float32, so its texts have to be padded alike.
    collator = trainer.data_collator
    collator.encoder_tokenizer = replace(collator.encoder_tokenizer, batch_padding=None)

    def forward(rows):
        batch = collator(rows)
        with torch.no_grad(), float64_throughout():
            loss, outputs = trainer.compute_loss(model, batch, return_outputs=True, num_items_in_batch=1)
        return batch["turn_ids"], outputs.logits, loss

    (turns, logits, loss), (turns_alone, logits_alone, loss_alone) = forward([together]), forward(apart)
    torch.testing.assert_close(loss, loss_alone, rtol=1e-10, atol=1e-10)
    for number in range(3):
        packed, alone = logits[0][turns[0] == number + 1], logits_alone[number][turns_alone[number] == 1]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_infinite_loss_stops_the_run(trainer, name):
    """A loss that is not finite stops the run before a weight changes, and names the rows."""
    weight = trainer.model.model.projector.up.weight
    if name == "loss":
        weight.data.fill_(float("nan"))
    else:
        weight.register_hook(lambda gradient: gradient * float("inf"))
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match=rf"The {name} is (nan|inf) at step 0 for the rows with the ids \['row-"):
        trainer.train()
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_model_error_names_rows(trainer, monkeypatch):
    broken = lambda self, inputs: torch.full((inputs.num_slots, 12), torch.nan)  # noqa: E731
    monkeypatch.setattr(SentenceEncoder, "encode_inputs", broken)
    with pytest.raises(ValueError, match="NaN or absolute values above") as error:
        trainer.train()
    assert error.value.__notes__[0].startswith(
        "The error occurred at step 0, in the batch of the rows with the ids ['row-"
    )
