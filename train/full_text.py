"""The honest upper bound: the backbone itself, fine-tuned with plain LoRA to answer from the passages' whole text.

    python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml

Same questions, prompt, template and targets as stage II, with the text where the slots would be; LoRA on every row, by
PEFT and TRL as they come. `evaluation/report.py` puts its answers beside those from slots.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer, TrlParser

from ..defaults_arcaligner import resolve_base_model
from ..evaluation.answering import full_text
from .corpora import read_rows

logger = logging.getLogger(__name__)


@dataclass
class FullTextArguments:
    """
    The keys of the recipe that are not [`~trl.SFTConfig`]'s.

    Args:
        model_name_or_path (`str`): The backbone.
        train_file (`str`): JSON Lines rows of questions, passages and answers.
        num_skipped_rows, max_train_samples (`int`): Which of the shuffled rows are trained on.
        max_tokens (`int`): Longer examples are left out.
        lora_r (`int`), lora_alpha (`int`): Of the LoRA on all linears.
    """

    model_name_or_path: str = field(metadata={"help": "Backbone"})
    train_file: str = field(metadata={"help": "JSON Lines rows"})
    max_train_samples: int = field(metadata={"help": "Training examples"})
    max_tokens: int = field(default=512, metadata={"help": "Leave out longer examples"})
    lora_r: int = field(default=16, metadata={"help": "LoRA rank"})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA alpha"})


def build_dataset(recipe: FullTextArguments, tokenizer, seed: int) -> datasets.Dataset:
    """Prompts and targets as ids; only the answer and the end of the turn are learned."""
    rows = datasets.Dataset.from_list(
        [
            {"user": full_text(row), "answer": row["answers"][0]}
            for row in read_rows(recipe.train_file)
            if row["answers"] and row["passages"] and row["question"]
        ]
    ).shuffle(seed=seed)

    def tokenize(row):
        messages = [{"role": "user", "content": row["user"]}, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
        prompt, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole))
        return {"input_ids": whole, "completion_mask": [0] * len(prompt) + [1] * (len(whole) - len(prompt))}

    rows = rows.select(range(min(len(rows), 2 * recipe.max_train_samples)))
    rows = rows.map(tokenize, remove_columns=rows.column_names, desc="tokenising")
    rows = rows.filter(lambda row: len(row["input_ids"]) <= recipe.max_tokens)
    return rows.select(range(min(len(rows), recipe.max_train_samples)))


def main(recipe: FullTextArguments, args: SFTConfig) -> None:
    """Trains the LoRA and writes it, as PEFT does, to `output_dir`."""
    model_path = resolve_base_model(recipe.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    if args.chat_template_path is not None:
        tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        args.chat_template_path = None
    set_seed(args.seed)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
        args=args,
        train_dataset=build_dataset(recipe, tokenizer, args.seed),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=recipe.lora_r, lora_alpha=recipe.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    main(*TrlParser((FullTextArguments, SFTConfig)).parse_args_and_config(sys.argv[1:]))
