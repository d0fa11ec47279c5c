"""The design of COCOM: the backbone turns passages into states of compression tokens, and two runs train it."""

from pathlib import Path

import pytest
import torch
import yaml
from training_recipes import run_until
from training_rows import passage_rows, question_rows, write_rows
from transformers import AutoModelForCausalLM, Trainer

from arcaligner.evaluation.answering import independent_text
from arcaligner.train import cocom as script
from arcaligner.train.cocom import CocomArguments, CocomCollator, CompressingModel, build_dataset, tokenize
from arcaligner.train.prompts import passages_text
from arcaligner.train.recipe import parse_recipe
from arcaligner.train.stages import RECIPES


def arguments(folder: Path, base_model_dir: Path, output_dir: Path, asks: bool = True, **changes) -> list[str]:
    """A recipe of two steps of four rows each."""
    rows = question_rows(12) if asks else passage_rows(12)
    train_file = write_rows(folder / f"{output_dir.name}.jsonl", rows)
    keys = {"model_name_or_path": str(base_model_dir), "output_dir": str(output_dir), "train_file": train_file}
    keys |= {"data_dir": "", "max_train_samples": 8, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    keys |= {"num_train_epochs": 1, "gradient_checkpointing": False, "logging_steps": 1, "save_steps": 1}
    keys |= {"use_cpu": True, "bf16": False, "report_to": "none", "asks": asks, "lora_r": 4, "tokens_per_slot": 4}
    path = folder / f"{output_dir.name}.yaml"
    path.write_text(yaml.safe_dump(keys | changes))
    return ["--config", str(path)]


def run(options: list[str]) -> None:
    script.train(*parse_recipe(script.SCRIPT, script.KINDS, options))


def compressing(base_model_dir: Path, tokens_per_slot: int = 4) -> CompressingModel:
    """A compressing model with random weights, in float64."""
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    model = CompressingModel.new(base, CocomArguments("base", "file", 1, lora_r=4, tokens_per_slot=tokens_per_slot))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model.double().eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base_model_dir) -> tuple[Path, Path]:
    """The folders of the first and the second run, neither of which was interrupted."""
    folder = tmp_path_factory.mktemp("cocom")
    run(arguments(folder, base_model_dir, folder / "first", asks=False))
    run(arguments(folder, base_model_dir, folder / "second", start_from=str(folder / "first")))
    return folder / "first", folder / "second"


def test_spans_are_compressed_independently(base_model_dir):
    """The vectors of a span, one for every four tokens with the norm of a word, do not depend on batch or padding."""
    model = compressing(base_model_dir)
    ids = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15], [16, 17, 18, 19]]
    rows = [
        {"prefix_ids": [1], "passages": [ids[0], ids[1]], "suffix_ids": [2]},
        {"prefix_ids": [1], "passages": [ids[2]], "suffix_ids": [2]},
    ]
    batch = CocomCollator(0, 4)(rows)
    slots = model.compress(batch["span_ids"], batch["span_mask"])
    assert batch["slot_mask"].sum(dim=1).tolist() == [4, 1] and len(slots) == 5
    alone = [model.compress(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool)) for tokens in ids]
    torch.testing.assert_close(slots, torch.cat(alone), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slots.norm(dim=1), model.norm.expand(5))
    base = model.model.get_base_model().base_model
    words = model.model.get_input_embeddings()(torch.tensor([ids[1]]))
    embeds = torch.cat([words, model.compression_token[None, None]], dim=1)
    state = base(inputs_embeds=embeds).last_hidden_state[0, -1]
    torch.testing.assert_close(slots[3], state / state.norm() * model.norm, rtol=1e-9, atol=1e-9)


def test_long_passages_are_cut(base_model_dir):
    row = {"prefix_ids": [1], "passages": [list(range(3, 3 + 130))], "suffix_ids": [2]}
    batch = CocomCollator(0, 16)([row])
    assert batch["span_mask"].sum(dim=1).tolist() == [128, 2] and batch["slot_mask"].sum() == 8 + 1
    assert compressing(base_model_dir, 16).num_slots(row["passages"][0]) == 9


def test_slots_replace_passages(base_model_dir):
    """The compressed passages are in their places in the prompt, in order; a prompt without passages is unchanged."""
    model = compressing(base_model_dir)
    rows = [
        {"prefix_ids": [1, 2], "passages": [[5, 6, 7]], "suffix_ids": [3]},
        {"prefix_ids": [1], "passages": [[8] * 5], "suffix_ids": [3, 4]},
    ]
    batch = CocomCollator(0, 4, padding_side="left")(rows)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 3], [1, 0, 0, 3, 4]]
    batch.pop("labels"), batch.pop("attention_mask")
    embeds = model.embed(**batch)
    slots = model.compress(batch["span_ids"], batch["span_mask"])
    torch.testing.assert_close(embeds[batch["slot_mask"]], slots)
    words = model.model.get_input_embeddings()
    torch.testing.assert_close(embeds[~batch["slot_mask"]], words(batch["input_ids"])[~batch["slot_mask"]])
    none = CocomCollator(0, 4)([{"prefix_ids": [1], "passages": [], "suffix_ids": [2]}])
    none = {name: none[name] for name in batch}
    torch.testing.assert_close(model.embed(**none), words(torch.tensor([[1, 2]])))


def test_targets_are_answers_or_texts(tokenizer, processor):
    """With `asks` the prompt is that of evaluation and the target the answer, otherwise the passages' text."""
    (row,) = question_rows(1)
    example = tokenize(row, tokenizer, asks=True)
    parts = independent_text(processor, row)
    assert [example[name] for name in ("prefix_ids", "passages", "suffix_ids")] == list(parts)
    assert tokenizer.decode(example["target"]) == row["answers"][0] + "<|im_end|>"
    back = tokenize(passage_rows(1)[0], tokenizer, asks=False)
    assert tokenizer.decode(back["target"]) == passages_text(row) + "<|im_end|>"
    assert back["passages"] == example["passages"]


def test_long_rows_are_left_out(tmp_path, tokenizer):
    rows = question_rows(4)
    rows[0]["passages"][0]["text"] *= 100
    path = write_rows(tmp_path / "rows.jsonl", rows)
    recipe = CocomArguments("base", path, 10, data_dir="", max_tokens=60)
    assert len(build_dataset(recipe, tokenizer, seed=0)) == 3
    with pytest.raises(
        ValueError, match="rows.jsonl has no usable row; expected rows with passages of at most 1 tokens"
    ):
        build_dataset(CocomArguments("base", path, 10, data_dir="", max_tokens=1), tokenizer, seed=0)


def test_only_answers_are_learned(base_model_dir, tokenizer):
    """The loss is that of the target after compressed passages, and trains LoRA and compression token only."""
    model = compressing(base_model_dir).train()
    examples = [tokenize(row, tokenizer, asks=True) for row in question_rows(3)]
    batch = CocomCollator(0, 4)(examples)
    loss = model(**batch).loss
    logits = model.model(
        inputs_embeds=model.embed(*(batch[name] for name in ("input_ids", "slot_mask", "span_ids", "span_mask"))),
        attention_mask=batch["attention_mask"],
    ).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert all("lora" in name for name in trained - {"compression_token", "norm"})
    assert {"compression_token", "norm"} < trained


def test_two_runs_train_and_load(runs, base_model_dir):
    """The second run continues the first, both train their parameters, and a saved model answers as before."""
    base = [AutoModelForCausalLM.from_pretrained(base_model_dir) for _ in range(3)]
    new = CompressingModel.new(base[0], CocomArguments("base", "file", 1, lora_r=4)).state_dict()
    first, second = (CompressingModel.load(model, folder) for model, folder in zip(base[1:], runs, strict=True))
    tensors = [model.compression_token for model in (first, second)]
    assert not torch.equal(new["compression_token"], tensors[0]) and not torch.equal(*tensors)
    assert first.tokens_per_slot == 4 and set(new) > {"norm", "compression_token"}
    assert not any("embed_tokens" in name for name in new)


def test_resumed_run_equals_uninterrupted(tmp_path, base_model_dir, runs):
    options = arguments(tmp_path, base_model_dir, tmp_path / "run", asks=False)
    run_until(1, options, run, Trainer)
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    run(options)
    base = [AutoModelForCausalLM.from_pretrained(base_model_dir) for _ in range(2)]
    resumed, whole = (
        dict(CompressingModel.load(model, folder, is_trainable=True).named_parameters())
        for model, folder in zip(base, (tmp_path / "run", runs[0]), strict=True)
    )
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"start_from": "runs/nowhere"}, "`start_from` is runs/nowhere, but .* contains no finished run"),
        ({"tokens_per_slot": 16}, "`tokens_per_slot` is 16, but .*first was trained with 4"),
        ({"tokens_per_slot": 0}, "`tokens_per_slot` is 0; expected a number of at least 1"),
    ],
)
def test_wrong_starts_are_refused(tmp_path, base_model_dir, runs, changes, message):
    with pytest.raises(ValueError, match=message):
        run(arguments(tmp_path, base_model_dir, tmp_path / "run", **{"start_from": str(runs[0])} | changes))


def test_shipped_recipes_fit_together():
    paths = [RECIPES / "smollm2_135m" / f"{name}.yaml" for name in ("cocom_pretraining", "cocom")]
    (first, first_args, _), (second, second_args, _) = (
        parse_recipe(script.SCRIPT, script.KINDS, ["--config", str(path)]) for path in paths
    )
    assert second.start_from == first_args.output_dir and (first.asks, second.asks) == (False, True)
    assert first.tokens_per_slot == second.tokens_per_slot == 4
    assert second_args.chat_template_path == first_args.chat_template_path
