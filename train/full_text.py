"""The full-text baseline: the base model, fine-tuned with plain LoRA to answer from the passages' whole text.

    python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml

Same questions, prompt, template and targets as stage II, with the text where the slots would be; LoRA on every row, by
PEFT and TRL. `arcaligner evaluate --full-text-lora` compares its answers with those from slots. A run
resumes from the last checkpoint in its `output_dir`, unless its settings have changed. A finished one is left alone.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import datasets
from peft import LoraConfig
from peft.utils import CONFIG_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from ..base_model_arcaligner import resolve_model
from ..checkpoint_arcaligner import written_whole
from ..common.rows import Row
from .corpora import open_corpus
from .data import full_text
from .recipe import run_script
from .run import claim_folder, last_checkpoint
from .selection import missing_part

logger = logging.getLogger(__name__)


@dataclass
class FullTextArguments:
    """
    The keys of the recipe that are not [`~trl.SFTConfig`]'s.

    Args:
        model_name_or_path (`str`): The base model.
        train_file (`str`): Rows of questions, passages and answers, a source as in `corpora.py`.
        max_train_samples (`int`): How many of the shuffled rows are trained on.
        data_dir (`str`): Folder of a data file with a relative path.
        max_tokens (`int`): Longer examples are left out.
        lora_r (`int`), lora_alpha (`int`): Rank and scale of the LoRA on all linears.
    """

    model_name_or_path: str
    train_file: str
    max_train_samples: int
    data_dir: str = "data"
    max_tokens: int = 512
    lora_r: int = 16
    lora_alpha: int = 32

    @property
    def sources(self) -> list[str]:
        """The data that the recipe names."""
        return [self.train_file]


SCRIPT = "arcaligner.train.full_text"
KINDS = (FullTextArguments, SFTConfig)


def build_dataset(recipe: FullTextArguments, tokenizer, seed: int) -> datasets.Dataset:
    """The first of the shuffled rows that fit, as `input_ids` and `labels`.

    Raises:
        `ValueError`: no row that fits; a chat template whose prompt is not the beginning of the whole conversation.
    """
    examples, num_long = [], 0
    for row in open_corpus(recipe.train_file, data_dir=recipe.data_dir).shuffle(seed=seed):
        if missing_part(row, needs_question=True):
            continue
        example = tokenize(row, tokenizer)
        if len(example["input_ids"]) <= recipe.max_tokens:
            examples.append(example)
        else:
            num_long += 1
        if len(examples) == recipe.max_train_samples:
            break
    logger.info("%d examples; %d longer than %d tokens left out", len(examples), num_long, recipe.max_tokens)
    if not examples:
        raise ValueError(
            f"{recipe.train_file} has no row with a question, an answer, a passage and at most {recipe.max_tokens} "
            "tokens. Raise `max_tokens`, or name another `train_file`."
        )
    return datasets.Dataset.from_list(examples)


def tokenize(row: Row, tokenizer) -> dict[str, list[int]]:
    """Ids of the prompt and the answer; labels on the answer and the end of its turn."""
    messages = [{"role": "user", "content": full_text(row)}, {"role": "assistant", "content": row["answers"][0]}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not whole.startswith(prompt):
        raise ValueError(
            f"Row {row['id']}: the prompt {prompt!r} is not how the whole conversation {whole!r} begins, so the answer "
            "cannot be told from the prompt. Name another `chat_template_path`."
        )
    # Not in one piece: the prompt has to be the very ids that an answer is asked for with.
    parts = prompt, whole.removeprefix(prompt).rstrip()
    prompt_ids, target_ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return {"input_ids": prompt_ids + target_ids, "labels": [-100] * len(prompt_ids) + target_ids}


def train(recipe: FullTextArguments, args: SFTConfig, settings: str) -> None:
    """Trains the LoRA, alone in its folder, and writes it there as PEFT does; `settings` are of `run_settings`."""
    with claim_folder(args.output_dir, settings, is_main=args.process_index == 0):
        if Path(args.output_dir, CONFIG_NAME).exists():
            logger.info("%s is finished; delete it to train it again", args.output_dir)
            return
        model_path = resolve_model(recipe.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if args.chat_template_path is not None:
            tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        args.max_length = None  # a row that is too long is left out; TRL would cut its answer off
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
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
        with written_whole(args.output_dir, last=CONFIG_NAME) as folder:
            trainer.save_model(str(folder))
        logger.info("saved to %s", args.output_dir)


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, train)
