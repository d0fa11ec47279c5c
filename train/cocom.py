"""COCOM's design as a baseline: the backbone itself compresses passages, with compression tokens and a LoRA.

    python -m arcaligner.train.cocom --config train/recipes/smollm2_135m/cocom_pretraining.yaml
    python -m arcaligner.train.cocom --config train/recipes/smollm2_135m/cocom.yaml
    python -m arcaligner.train.cocom --config ... --tokens_per_slot 16 --output_dir runs/smollm2_135m/cocom_x16

Rau et al., 2025 (https://huggingface.co/papers/2407.09252): a passage is cut into spans of 128 tokens, and compression
tokens are appended to each, one for every 4 or 16 tokens. Their last hidden states replace the passage in the prompt.
One LoRA, on all positions, compresses and answers. It is trained first to reconstruct passages (without `start_from`),
then to answer. A run resumes from the last checkpoint in its `output_dir`; a finished one is not trained again.
`arcaligner evaluate --cocom-x4 FOLDER --cocom-x16 FOLDER` compares its answers with those from slots.

There are two differences from their paper. The states are scaled to the norm of word embeddings, because otherwise a
small model that is trained for few steps repeats them. The compression tokens share one embedding, and differ in
position only.
"""

import json
import logging
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import CONFIG_NAME
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed
from transformers.modeling_outputs import CausalLMOutput

from ..common.files import write_atomically
from ..common.rows import Row
from ..loading_arcaligner import resolve_model, write_folder_atomically
from ..modeling_arcaligner import head_nll
from .batches import padded
from .examples import choose_template, missing_part, open_corpus
from .prompts import IndependentText, passages_text, text_prompt
from .recipe import TextTrainingConfig, run_script, with_help
from .run import claim_folder, last_checkpoint, preparation

logger = logging.getLogger(__name__)

SPAN_TOKENS = 128  # tokens of a passage that are compressed together, as in the paper
SETTINGS, TOKENS = "cocom.json", "compression_tokens.safetensors"  # next to PEFT's files


@with_help
@dataclass
class CocomArguments:
    """
    The keys of the recipe that are not [`TextTrainingConfig`]'s.

    Args:
        model_name_or_path (`str`): The base model.
        train_file (`str`): Training data: a JSON Lines or Parquet file, or a data set of the Hub (docs/training.md
            describes the formats). Its rows have questions, passages and answers or, if `asks` is false, passages.
        max_train_samples (`int`): Maximum number of rows to train on; they are drawn at random.
        start_from (`str`, *optional*): Folder of a finished run whose weights this run starts from. Default: new
            weights.
        asks (`bool`): Whether the model learns to answer questions. If false, it learns to repeat the passages.
        tokens_per_slot (`int`): Number of tokens of text that one compression token replaces.
        data_dir (`str`): Folder of `train_file`, if its path is relative.
        max_tokens (`int`): Maximum number of tokens of all passages of a row; rows with more are left out.
        lora_r (`int`): Rank of the LoRA, which is on all linear layers.
        lora_alpha (`int`): Scale of the LoRA.
        dtype (`str`): The dtype of the base model, which is not trained; the trained weights are always float32.
        attn_implementation (`str`, *optional*): Attention kernel, by its name in transformers, such as `"sdpa"`.
            Default: transformers chooses.
    """

    model_name_or_path: str
    train_file: str
    max_train_samples: int
    start_from: str | None = None
    asks: bool = True
    tokens_per_slot: int = 4
    data_dir: str = "data"
    max_tokens: int = 400
    lora_r: int = 16
    lora_alpha: int = 32
    dtype: str = "float32"
    attn_implementation: str | None = None

    def __post_init__(self):
        if self.tokens_per_slot < 1:
            raise ValueError(f"`tokens_per_slot` is {self.tokens_per_slot}; expected a number of at least 1.")

    @property
    def sources(self) -> list[str]:
        """The data that the recipe names."""
        return [self.train_file]


SCRIPT = "arcaligner.train.cocom"
KINDS = (CocomArguments, TextTrainingConfig)


class CompressingModel(nn.Module):
    """
    A causal language model that compresses passages itself, and attends to the compressed vectors.

    Args:
        model ([`PeftModel`]): The base model with its LoRA.
        tokens_per_slot (`int`): Tokens for each compression token.
    """

    _keys_to_ignore_on_save = None  # `Trainer` needs this attribute when it resumes

    def __init__(self, model: PeftModel, tokens_per_slot: int):
        super().__init__()
        self.model, self.tokens_per_slot = model, tokens_per_slot
        table = model.get_input_embeddings().weight.detach().float()
        self.compression_token = nn.Parameter(table.mean(dim=0))  # (hidden,)
        self.norm = nn.Parameter(table.norm(dim=1).mean())
        self.register_state_dict_post_hook(_drop_frozen_weights)

    @classmethod
    def new(cls, base, recipe: CocomArguments) -> "CompressingModel":
        """Create an untrained model around a base model."""
        sizes = {"r": recipe.lora_r, "lora_alpha": recipe.lora_alpha}
        lora = LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")
        return cls(get_peft_model(base, lora), recipe.tokens_per_slot)

    @classmethod
    def load(cls, base, folder: str | Path, is_trainable: bool = False) -> "CompressingModel":
        """Load the weights of [`save`] around a base model."""
        settings = json.loads(Path(folder, SETTINGS).read_text(encoding="utf-8"))
        model = cls(PeftModel.from_pretrained(base, folder, is_trainable=is_trainable), settings["tokens_per_slot"])
        model.load_state_dict(load_file(Path(folder, TOKENS)), strict=False)
        return model

    def save(self, folder: str | Path) -> None:
        """Write the LoRA in PEFT's format, and next to it the compression token and the number of tokens that it
        replaces."""
        tokens = {"compression_token": self.compression_token, "norm": self.norm}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tokens.items()}, Path(folder, TOKENS))
        write_atomically(Path(folder, SETTINGS), json.dumps({"tokens_per_slot": self.tokens_per_slot}) + "\n")
        self.model.save_pretrained(str(folder))

    def num_slots(self, ids: Sequence[int]) -> int:
        """The number of compression tokens of a passage."""
        return sum(math.ceil(len(part) / self.tokens_per_slot) for part in spans_of(ids))

    def compress(self, ids: torch.LongTensor, mask: torch.BoolTensor) -> torch.Tensor:
        """Last hidden states (num_slots, hidden) of the compression tokens that are appended to the spans `ids`
        (num_spans, longest), in the order of the spans. `ids` are left-padded; `mask` is true at their tokens."""
        counts = (mask.sum(dim=1) + self.tokens_per_slot - 1) // self.tokens_per_slot  # (num_spans,)
        embeds = self.model.get_input_embeddings()(ids)  # (num_spans, longest, hidden)
        indices = torch.arange(int(counts.max()), device=ids.device)
        is_token = indices < counts[:, None]  # (num_spans, most)
        tokens = self.compression_token.to(embeds.dtype).expand(*is_token.shape, -1)
        attention_mask = torch.cat([mask, is_token], dim=1)  # (num_spans, longest + most)
        states = (
            self.model.get_base_model()
            .base_model(
                inputs_embeds=torch.cat([embeds, tokens], dim=1),
                attention_mask=attention_mask.long(),
                position_ids=(attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
                use_cache=False,
            )
            .last_hidden_state[:, ids.shape[1] :]
        )
        return nn.functional.normalize(states[is_token], dim=-1) * self.norm.to(states.dtype)

    def embed(self, input_ids, slot_mask, span_ids, span_mask) -> torch.Tensor:
        """Embeddings (batch, seq_len, hidden) of prompts, with the compressed passages where `slot_mask` is true."""
        embeds = self.model.get_input_embeddings()(input_ids)
        if not slot_mask.any():
            return embeds
        slots = self.compress(span_ids, span_mask)
        return embeds.masked_scatter(slot_mask[:, :, None], slots.to(embeds.dtype))

    def forward(
        self, input_ids, slot_mask, span_ids, span_mask, attention_mask, labels, num_items_in_batch=None
    ) -> CausalLMOutput:
        """The mean NLL of the labeled positions or, with `num_items_in_batch`, their sum divided by it. The other
        inputs are those of [`CocomCollator`]. Logits of other positions are not computed."""
        embeds, base = self.embed(input_ids, slot_mask, span_ids, span_mask), self.model.get_base_model()
        states = base.base_model(inputs_embeds=embeds, attention_mask=attention_mask, use_cache=False)
        targets = labels[:, 1:]  # (batch, seq_len - 1)
        is_target = targets != -100
        predicting = states.last_hidden_state[:, :-1][is_target]  # (num_targets, hidden)
        nll = head_nll(predicting, targets[is_target], base.get_output_embeddings(), base.config.get_text_config())
        return CausalLMOutput(loss=nll / (is_target.sum() if num_items_in_batch is None else num_items_in_batch))


def _drop_frozen_weights(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: dict) -> None:
    """Remove the weights that are not trained, those of the base model, from the `state` of a checkpoint."""
    trained = {f"{prefix}{name}" for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name not in trained]:
        del state[name]


# Examples


def spans_of(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The spans of a passage that are compressed together."""
    return (ids[start : start + SPAN_TOKENS] for start in range(0, len(ids), SPAN_TOKENS))


def tokenize(row: Row, tokenizer, asks: bool) -> dict[str, Any]:
    """The prompt around the passages, each tokenized separately, and the target: an answer, or the text of the
    passages."""
    mark = uuid.uuid4().hex
    before, after = choose_template(row["id"])
    content = text_prompt(row, mark) if asks else before + mark + after
    target = row["answers"][0] if asks else passages_text(row)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": target}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    conversation = tokenizer.apply_chat_template(messages, tokenize=False)
    if not conversation.startswith(prompt):
        raise ValueError(
            f"The chat template writes the prompt of row {row['id']} differently if an answer follows, so the answer "
            "cannot be separated from the prompt. Set `chat_template_path` to the file of another template."
        )

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    parts = IndependentText.of(row, *prompt.split(mark), ids_of)
    return {**parts._asdict(), "target": ids_of(conversation.removeprefix(prompt).rstrip())}


def build_dataset(recipe: CocomArguments, tokenizer, seed: int) -> datasets.Dataset:
    """The first shuffled rows that fit into `max_tokens`."""
    examples, num_long = [], 0
    for row in open_corpus(recipe.train_file, data_dir=recipe.data_dir).shuffle(seed=seed):
        if missing_part(row, asks=recipe.asks):
            continue
        example = tokenize(row, tokenizer, recipe.asks)
        if sum(map(len, example["passages"])) > recipe.max_tokens:
            num_long += 1
        else:
            examples.append(example | {"length": sum(map(len, (*example["passages"], example["target"])))})
        if len(examples) == recipe.max_train_samples:
            break
    logger.info(
        "%d examples; left out %d whose passages have more than %d tokens (`max_tokens`)",
        *(len(examples), num_long, recipe.max_tokens),
    )
    if not examples:
        raise ValueError(
            f"{recipe.train_file} has no usable row; expected rows with passages of at most {recipe.max_tokens} tokens "
            f"in all{' and a question with an answer' if recipe.asks else ''}. Raise `max_tokens`, or choose another "
            "`train_file`."
        )
    return datasets.Dataset.from_list(examples)


@dataclass
class CocomCollator:
    """
    Makes a padded batch: `input_ids`, `slot_mask`, `attention_mask` and `labels` (batch, seq_len), and the spans of all
    passages in order, left-padded: `span_ids` and `span_mask` (num_spans, longest).
    """

    pad_token_id: int
    tokens_per_slot: int
    padding_side: str = "right"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        row_spans = [[span for passage in row["passages"] for span in spans_of(passage)] for row in rows]
        ids, slots, labels = [], [], []
        for row, spans in zip(rows, row_spans, strict=True):
            count = sum(math.ceil(len(span) / self.tokens_per_slot) for span in spans)
            around = row["prefix_ids"] + [self.pad_token_id] * count + row["suffix_ids"]
            target = row.get("target", [])
            ids.append(around + target)
            slots.append([0] * len(row["prefix_ids"]) + [1] * count + [0] * (len(row["suffix_ids"]) + len(target)))
            labels.append([-100] * len(around) + target)
        all_spans = [span for spans in row_spans for span in spans] or [[self.pad_token_id]]
        return {
            "input_ids": padded(ids, self.pad_token_id, self.padding_side),
            "slot_mask": padded(slots, 0, self.padding_side).bool(),
            "attention_mask": padded([[1] * len(row) for row in ids], 0, self.padding_side),
            "labels": padded(labels, -100, self.padding_side),
            "span_ids": padded(all_spans, self.pad_token_id, "left"),
            "span_mask": padded([[1] * len(span) for span in all_spans], 0, "left").bool(),
        }


# Training


def train(recipe: CocomArguments, args: TextTrainingConfig, settings: str) -> None:
    """Train, and write what [`CompressingModel.load`] reads. The folder is locked meanwhile; `settings` are those of
    `run_settings`."""
    with claim_folder(args.output_dir, settings, is_main=args.process_index == 0):
        if Path(args.output_dir, CONFIG_NAME).exists():
            logger.info("the run in %s is finished; delete this folder to train again", args.output_dir)
            return
        model_path = resolve_model(recipe.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if args.chat_template_path is not None:
            tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        with preparation():
            train_dataset = build_dataset(recipe, tokenizer, args.seed)
        set_seed(args.seed)
        kernel = {"dtype": recipe.dtype, "attn_implementation": recipe.attn_implementation}
        with preparation():
            model = start_model(recipe, AutoModelForCausalLM.from_pretrained(model_path, **kernel))
        args.remove_unused_columns = False
        trainer = Trainer(
            model,
            args=args,
            train_dataset=train_dataset,
            data_collator=CocomCollator(tokenizer.pad_token_id or 0, recipe.tokens_per_slot),
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
        with write_folder_atomically(args.output_dir, last=CONFIG_NAME) as folder:
            model.save(folder)
        logger.info("saved the trained weights in %s", args.output_dir)


def start_model(recipe: CocomArguments, base) -> CompressingModel:
    """The model that a run starts from.

    Raises:
        `ValueError`: a `start_from` that is not finished, or was trained with other tokens per slot.
    """
    if recipe.start_from is None:
        return CompressingModel.new(base, recipe)
    folder = Path(recipe.start_from)
    if not (folder / CONFIG_NAME).exists():
        raise ValueError(
            f"`start_from` is {folder}, but this folder has no {CONFIG_NAME}, so it contains no finished run. Finish "
            "that run, or set `start_from` to the folder of a finished one, or leave `start_from` out."
        )
    model = CompressingModel.load(base, folder, is_trainable=True)
    if model.tokens_per_slot != recipe.tokens_per_slot:
        raise ValueError(
            f"`tokens_per_slot` is {recipe.tokens_per_slot}, but {folder} was trained with {model.tokens_per_slot}. "
            "Set `start_from` to a run with the same `tokens_per_slot`, or change `tokens_per_slot`."
        )
    return model


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, train)
