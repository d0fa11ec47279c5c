"""The upper bound learns answers only, from the prompt of the evaluation, and continues after a kill."""

from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from training_recipes import run_until
from training_rows import question_rows, write_rows
from transformers import AutoModelForCausalLM, DynamicCache
from trl import SFTTrainer

from arcaligner.train import full_text as script
from arcaligner.train.full_text import FullTextArguments, IndependentCollator, build_dataset, full_text, tokenize
from arcaligner.train.prompts import passages_text
from arcaligner.train.recipe import parse_recipe
from arcaligner.train.stages import RECIPES

TEMPLATE = RECIPES / "smollm2_135m" / "chat_template.jinja"
WEIGHTS = "adapter_model.safetensors"


def arguments(folder: Path, base_model_dir: Path, output_dir: Path, **changes) -> list[str]:
    """A recipe of two steps of four rows each."""
    train_file = write_rows(folder / "questions.jsonl", question_rows(12))
    keys = {"model_name_or_path": str(base_model_dir), "output_dir": str(output_dir), "train_file": train_file}
    keys |= {"data_dir": "", "max_train_samples": 8, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    keys |= {"num_train_epochs": 1, "logging_steps": 1, "save_steps": 1}
    keys |= {"use_cpu": True, "bf16": False, "report_to": "none"}
    path = folder / f"{output_dir.name}.yaml"
    path.write_text(yaml.safe_dump(keys | changes))
    return ["--config", str(path)]


def run(options: list[str]) -> None:
    script.train(*parse_recipe(script.SCRIPT, script.KINDS, options))


def of_file(path: str, **limits) -> FullTextArguments:
    return FullTextArguments("base", path, **{"max_train_samples": 100, "data_dir": "", "max_tokens": 500, **limits})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, base_model_dir) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("full_text")
    run(arguments(folder, base_model_dir, folder / "whole"))
    return folder / "whole"


def prompt_of(tokenizer, row) -> str:
    messages = [{"role": "user", "content": full_text(row)}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_answers_are_learned(tokenizer, monkeypatch):
    """Labels are those of the answer only; the prompt has none."""
    for template in (tokenizer.chat_template, TEMPLATE.read_text("utf-8")):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        for row in question_rows(3):
            example = tokenize(row, tokenizer)
            prompt_ids = tokenizer(prompt_of(tokenizer, row), add_special_tokens=False)["input_ids"]
            target = example["input_ids"][len(prompt_ids) :]
            assert example["input_ids"][: len(prompt_ids)] == prompt_ids
            assert example["labels"] == [-100] * len(prompt_ids) + target
            assert tokenizer.decode(target) == row["answers"][0] + "<|im_end|>"
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}{{ messages[0]['content'] }}")
    with pytest.raises(ValueError, match="prompt of row row-0 differently .*chat_template_path"):
        tokenize(question_rows(1)[0], tokenizer)


def test_unusable_rows_are_dropped(tmp_path, tokenizer):
    """Rows are shuffled, and long or incomplete ones are left out."""
    rows = question_rows(6)
    rows[0]["answers"], rows[1]["question"], rows[2]["passages"] = [], " ", []
    rows[3]["passages"][0]["text"] *= 100
    path = write_rows(tmp_path / "rows.jsonl", rows)
    expected = sorted(tokenize(row, tokenizer)["input_ids"] for row in rows[4:])
    assert sorted(build_dataset(of_file(path), tokenizer, seed=0)["input_ids"]) == expected
    assert len(build_dataset(of_file(path, max_train_samples=1), tokenizer, seed=0)) == 1
    with pytest.raises(ValueError, match="rows.jsonl has no usable row; .* at most 5 tokens"):
        build_dataset(of_file(path, max_tokens=5), tokenizer, seed=0)
    path = write_rows(tmp_path / "more.jsonl", question_rows(12))
    orders = [build_dataset(of_file(path), tokenizer, seed)["input_ids"] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_interrupted_run_continues(tmp_path, base_model_dir, whole_run, caplog):
    """An interrupted run ends as an uninterrupted one, and is not trained again."""
    options = arguments(tmp_path, base_model_dir, tmp_path / "run")
    run_until(1, options, run, SFTTrainer)
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    with pytest.raises(ValueError, match="run was started with .*: `learning_rate` was 0.01 and is now 0.5"):
        run([*options, "--learning_rate", "0.5"])
    with caplog.at_level("INFO"):
        run(options)
    assert f"resuming from {tmp_path / 'run' / 'checkpoint-1'}" in caplog.text
    resumed, changed = load_file(tmp_path / "run" / WEIGHTS), (tmp_path / "run" / WEIGHTS).stat().st_mtime_ns
    torch.testing.assert_close(resumed, load_file(whole_run / WEIGHTS), rtol=0, atol=0)
    with caplog.at_level("INFO"):
        run(options)
    assert "run is finished; delete this folder to train again" in caplog.text
    assert (tmp_path / "run" / WEIGHTS).stat().st_mtime_ns == changed
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["max_train_samples"] == 8
    with pytest.raises(ValueError, match="`lora_r` was not set and is now 4"):
        run([*options, "--lora_r", "4"])
    with pytest.raises(
        ValueError, match="is 'checkpoint-1', but .*checkpoint-2.*again from the base model, choose a new"
    ):
        run([*options, "--resume_from_checkpoint", "checkpoint-1"])


@pytest.mark.parametrize("key, value", [("max_length", "64"), ("packing", "True")])
def test_keys_of_trl_are_refused(tmp_path, base_model_dir, key, value):
    """Keys that would truncate or pack examples are refused, not ignored."""
    options = arguments(tmp_path, base_model_dir, tmp_path / "run")
    with pytest.raises(ValueError, match=f"`{key}` is {value}, but this script .*`max_tokens`"):
        run([*options, f"--{key}", value])


def test_shipped_recipes_match_stage_two():
    """The shipped recipes have the data and the template of stage II; they differ in how passages are read."""
    names = ("1_reconstruction", "2_grounding", "full_text", "full_text_apart")
    paths = [RECIPES / "smollm2_135m" / f"{name}.yaml" for name in names]
    first, second, joint, apart = (yaml.safe_load(path.read_text("utf-8")) for path in paths)
    recipe, args, _ = parse_recipe(script.SCRIPT, script.KINDS, ["--config", str(paths[2])])
    assert recipe.train_file in second["train_files"]
    assert recipe.model_name_or_path == first["model_name_or_path"]
    assert args.chat_template_path == first["chat_template_path"]
    differing = {"output_dir", "passage_attention", "distractors", "max_tokens"}
    assert {key for key in joint | apart if joint.get(key) != apart.get(key)} == differing


# Independent passages


def test_passages_are_tokenized_separately(tokenizer):
    """Each passage is tokenized by itself, between the parts of the prompt."""
    row = question_rows(3)[1]
    row["passages"] += question_rows(3)[2]["passages"]
    row["passages"][1]["title"] = ""
    example = tokenize(row, tokenizer, is_separate=True)
    ids, numbers = torch.tensor(example["input_ids"]), torch.tensor(example["passage_ids"])
    for number, passage in enumerate(row["passages"]):
        text = f"{passage['title']}: {passage['text']}" if passage["title"] else passage["text"]
        assert tokenizer.decode(ids[numbers == number]) == text
    target = ids[torch.tensor(example["labels"]) != -100]
    assert tokenizer.decode(target) == row["answers"][0] + "<|im_end|>"
    assert len(example["labels"]) == len(ids)
    is_passage = numbers >= 0
    prompt = prompt_of(tokenizer, row).replace(passages_text(row), "")
    assert tokenizer.decode(ids[~is_passage]) == prompt + tokenizer.decode(target)


def test_independent_passages_in_a_batch(base_model_dir, tokenizer):
    """The loss of a row is that of its answer after the keys and values of passages that were prefilled one by one."""
    model = AutoModelForCausalLM.from_pretrained(base_model_dir, dtype=torch.float32).eval()
    rows = question_rows(4)
    rows[0]["passages"] += rows[1]["passages"] + rows[2]["passages"]
    examples = [tokenize(row, tokenizer, is_separate=True) for row in (rows[0], rows[3])]
    batch = IndependentCollator(0)(examples)
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
        for row, example in enumerate(examples):
            ids, numbers = torch.tensor([example["input_ids"]]), example["passage_ids"]
            start, end = numbers.index(0), len(numbers) - numbers[::-1].index(max(numbers))
            whole, longest = DynamicCache(config=model.config), 0
            for number in range(max(numbers) + 1):
                cache = model(ids[:, :start], use_cache=True).past_key_values
                places = [place for place, passage_id in enumerate(numbers) if passage_id == number]
                cache = model(ids[:, places], past_key_values=cache).past_key_values
                longest = max(longest, len(places))
                for layer, cached in enumerate(cache.layers):
                    skipped = start if number else 0
                    whole.update(cached.keys[:, :, skipped:], cached.values[:, :, skipped:], layer)
            positions = torch.arange(len(numbers) - end)[None] + start + longest
            expected = model(ids[:, end:], past_key_values=whole, position_ids=positions).logits
            torch.testing.assert_close(logits[row, end : len(numbers)], expected[0], rtol=0, atol=1e-4)


def test_run_leaves_a_trained_lora(tmp_path, base_model_dir, whole_run):
    run(arguments(tmp_path, base_model_dir, tmp_path / "apart", passage_attention="separate", distractors=1.0))
    for folder in (whole_run, tmp_path / "apart"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model_dir), folder)
        assert all(tensor.abs().sum() > 0 for name, tensor in model.state_dict().items() if "lora_" in name)
    with pytest.raises(ValueError, match="`passage_attention` is 'apart'; expected one of joint, separate"):
        run(arguments(tmp_path, base_model_dir, tmp_path / "other", passage_attention="apart"))


def test_makers_learn_whole_questions(tmp_path, tokenizer):
    """A maker of questions leaves out questions without a question mark; a reader learns to answer them."""
    rows = question_rows(6)
    rows[2]["question"] = rows[2]["question"].rstrip("?")
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert len(build_dataset(of_file(path, writes="question"), tokenizer, 0)) == 5
    assert len(build_dataset(of_file(path), tokenizer, 0)) == 6


@pytest.mark.parametrize("name", ["full_text", "full_text_apart", "question_maker"])
def test_baselines_use_no_checkpointing(name):
    """Checkpointing is off under both of its names in transformers; older versions know only one of them."""
    path = RECIPES / "smollm2_135m" / f"{name}.yaml"
    _, args, _ = parse_recipe(script.SCRIPT, script.KINDS, ["--config", str(path), "--bf16", "false"])
    assert not args.gradient_checkpointing
    assert "activation_checkpointing" not in path.read_text(encoding="utf-8")
