"""The paper's own recipes at its own sizes, but for the number of layers: two steps of each stage, and an answer.

Nothing but what a machine with the Hub has is stood in for: folders of the working directory are its data sets, in the
format of HotpotQA and of Wikipedia, and the models are random.
"""

import json

import datasets
import pytest
import torch
import yaml
from conftest import pipeline_of
from safetensors.torch import load_file
from training_recipes import run
from training_rows import HOTPOTQA
from transformers import BertConfig, BertModel, BertTokenizerFast, MistralConfig, MistralForCausalLM

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train.stages import RECIPES

BASE, ENCODER = "mistralai/Mistral-7B-Instruct-v0.2", "Salesforce/SFR-Embedding-Mistral"
STAGES = ("1_reconstruction", "2_grounding", "3_gating")
LAYERS = 2  # of 32
# Smaller than in the recipe, to fit a machine and a test; all other keys are the recipe's.
SMALLER = {"max_steps": 2, "per_device_train_batch_size": 2, "global_batch_size": 2, "max_train_samples": 4}
SMALLER |= {"use_cpu": "true", "bf16": "false", "dataset_num_proc": 1, "logging_steps": 1}


def hub_data_set(path, config: str, **splits) -> None:
    """A folder with the layout of a data set on the Hub."""
    files = []
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(path / config / f"{split}-00000.parquet")
        files.append({"split": split, "path": f"{config}/{split}-*"})
    layout = {"configs": [{"config_name": config, "data_files": files}]}
    (path / "README.md").write_text(f"---\n{yaml.safe_dump(layout)}---\n")


@pytest.fixture
def place(tmp_path, monkeypatch, tokenizer):
    """The working directory with the data sets and the models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCALIGNER_MODELS", str(tmp_path / "models"))
    hub_data_set(
        tmp_path / "hotpotqa" / "hotpot_qa",
        "distractor",
        train=[HOTPOTQA | {"id": f"h{number}"} for number in range(8)],
        validation=[HOTPOTQA | {"id": "v"}],
    )
    text = "Ada was born in 1815. She wrote the notes in 1843. Nobody read them aloud. "
    articles = [{"id": str(number), "title": f"Ada {number}", "text": text * 2} for number in range(8)]
    hub_data_set(tmp_path / "wikimedia" / "wikipedia", "20231101.en", train=articles)
    sizes = yaml.safe_load((RECIPES.parent / "published.yaml").read_text(encoding="utf-8"))["models"][BASE]
    sizes = {name: size for name, size in sizes.items() if name != "model_type"} | {"num_hidden_layers": LAYERS}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    base = tmp_path / "models" / BASE
    MistralForCausalLM._from_config(MistralConfig(**sizes, **ids), dtype=torch.bfloat16).save_pretrained(base)
    tokenizer.save_pretrained(base)
    write_encoder(tmp_path / "models" / ENCODER)
    return tmp_path


def write_encoder(folder) -> None:
    """A random encoder of one layer that is as wide as the paper's."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab += [f"{mark}{chr(code)}" for code in range(33, 127) for mark in ("", "##")]
    sizes = {"vocab_size": len(vocab), "hidden_size": 4096, "intermediate_size": 16, "num_hidden_layers": 1}
    bert = BertModel(BertConfig(**sizes, num_attention_heads=8, max_position_embeddings=256))
    bert.save_pretrained(folder.parent / "bert")
    numbers = {token: number for number, token in enumerate(vocab)}
    BertTokenizerFast(vocab=numbers, model_max_length=256).save_pretrained(folder.parent / "bert")
    modules = [Transformer(str(folder.parent / "bert")), Pooling(4096)]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))


@pytest.mark.slow
def test_paper_stages_train_and_answer(place):
    """Stages I to III of `mistral_7b` take two steps each and change what they train; the last checkpoint answers, with
    a gate at each layer. Needs 7 GiB of memory and 3 GB of disk."""
    options = [text for name, value in SMALLER.items() for text in (f"--{name}", str(value))]
    options += ["--examples_cache_dir", str(place / "examples")]
    for stage in STAGES:
        run(["--config", str(RECIPES / "mistral_7b" / f"{stage}.yaml"), *options])
    folders = [place / "runs" / "mistral_7b" / stage for stage in STAGES]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    steps = [json.loads((folder / "trainer_state.json").read_text())["global_step"] for folder in folders]
    assert steps == [2, 2, 2]
    for before, after in zip(weights, weights[1:], strict=False):
        changed = {name.split(".")[-3] for name in before if not torch.equal(before[name], after[name])}
        assert "lora_B" in changed
    is_gate = {name: "slot_gate" in name for name in weights[2]}
    assert any(is_gate.values())
    assert any(not torch.equal(weights[1][name], weights[2][name]) for name, gated in is_gate.items() if gated)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name, gated in is_gate.items() if gated)
    model = ArcAlignerForCausalLM.from_pretrained(folders[-1]).eval()
    processor = ArcAlignerProcessor.from_pretrained(folders[-1])
    assert model.config.training_stage == "gating" and model.config.gated_layers == (0, 1)
    assert model.config.text_config.hidden_size == 4096 and model.config.lora_r == 128
    row = {"question": "Was Ada born before Ben?", "documents": ["Ada was born. In 1815.", "Ben."]}
    (record,) = pipeline_of(model, processor)(row, return_slots=True, max_new_tokens=2)
    assert len(record["trajectories"]) == LAYERS and len(record["segments"]) == 3
