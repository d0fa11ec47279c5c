"""The full-text baseline: fine-tune the base model with plain LoRA to answer from the whole text of the passages.

    python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml

Questions, prompt, template and targets are those of stage II, with the text in place of the slots. PEFT and TRL train
the LoRA, which changes every position. `arcaligner evaluate --full-text-lora` compares its answers with those from
slots. A run resumes from the last checkpoint in its `output_dir`, unless its settings have changed. A finished run is
not trained again.

With `passage_attention: separate` (`full_text_apart.yaml`) passages do not attend to each other and all start at the
same position, like independent slots, so that the keys and values of a passage's text can be cached and joined in the
same way (`kv_cache_arcaligner.py`). `arcaligner evaluate --text-apart` uses it.
"""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from peft import LoraConfig
from peft.utils import CONFIG_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTTrainer

from ..attention_arcaligner import passage_positions, separate_passages
from ..common.rows import Row
from ..configuration_arcaligner import PASSAGE_ATTENTIONS
from ..loading_arcaligner import resolve_model, write_folder_atomically
from .batches import padded
from .distractors import NearestPassages
from .examples import missing_part, open_corpus
from .prompts import IndependentText, full_text, question_prompt, text_prompt
from .recipe import TextTrainingConfig, run_script, with_help
from .run import claim_folder, last_checkpoint, preparation

logger = logging.getLogger(__name__)


@with_help
@dataclass
class FullTextArguments:
    """
    The keys of the recipe that are not [`TextTrainingConfig`]'s.

    Args:
        model_name_or_path (`str`): The base model.
        train_file (`str`): Training data with questions, passages and answers: a JSON Lines or Parquet file, or a data
            set of the Hub (docs/training.md describes the formats).
        max_train_samples (`int`): Maximum number of rows to train on; they are drawn at random.
        data_dir (`str`): Folder of `train_file`, if its path is relative.
        max_tokens (`int`): Maximum number of tokens of an example; longer ones are left out.
        lora_r (`int`): Rank of the LoRA, which is on all linear layers.
        lora_alpha (`int`): Scale of the LoRA.
        passage_attention (`str`): `"joint"`: a passage attends to those before it. `"separate"`: passages do not attend
            to each other.
        distractors (`float`): Share of rows, from 0 to 1, to which passages without the answer are added: 1 to 4 of
            those in `train_file` that are most similar to the question (BM25).
        writes (`str`): What the model learns to write from the passages: `"answer"`, the answer to the question; or
            `"question"`, first an answer and on the next line a question for it, as `train/made_questions.py` needs.
    """

    model_name_or_path: str
    train_file: str
    max_train_samples: int
    data_dir: str = "data"
    max_tokens: int = 512
    lora_r: int = 16
    lora_alpha: int = 32
    passage_attention: str = "joint"
    distractors: float = 0.0
    writes: str = "answer"

    def __post_init__(self):
        if self.writes not in WRITES:
            raise ValueError(f"`writes` is {self.writes!r}; expected one of {', '.join(WRITES)}.")
        if self.writes == "question" and self.passage_attention == "separate":
            raise ValueError(
                "`passage_attention` is 'separate', but with `writes: question` the passages of a row are joined into "
                "one text. Leave `passage_attention` out, or set `writes: answer`."
            )
        if self.passage_attention not in PASSAGE_ATTENTIONS:
            raise ValueError(
                f"`passage_attention` is {self.passage_attention!r}; expected one of {', '.join(PASSAGE_ATTENTIONS)}."
            )
        if not 0.0 <= self.distractors <= 1.0:
            raise ValueError(f"`distractors` is {self.distractors}; expected a share of the rows, from 0 to 1.")

    @property
    def sources(self) -> list[str]:
        """The data that the recipe names."""
        return [self.train_file]


WRITES = "answer", "question"
SCRIPT = "arcaligner.train.full_text"
KINDS = (FullTextArguments, TextTrainingConfig)


def build_dataset(recipe: FullTextArguments, tokenizer, seed: int) -> datasets.Dataset:
    """The first shuffled rows that fit into `max_tokens`, as `input_ids` and `labels`."""
    examples, num_long = [], 0
    corpus = open_corpus(recipe.train_file, data_dir=recipe.data_dir)
    nearest = NearestPassages(corpus) if recipe.distractors else None
    for row in corpus.shuffle(seed=seed):
        if missing_part(row, asks=True):
            continue
        # Without this the model would learn to leave question marks out, but a question without one counts as cut off.
        if recipe.writes == "question" and not row["question"].rstrip().endswith("?"):
            continue
        if nearest is not None:
            row = row | {"passages": nearest.mixed([row], recipe.distractors, seed)}
        example = tokenize(row, tokenizer, recipe.passage_attention == "separate", recipe.writes)
        if len(example["input_ids"]) <= recipe.max_tokens:
            examples.append(example)
        else:
            num_long += 1
        if len(examples) == recipe.max_train_samples:
            break
    logger.info(
        "%d examples; left out %d that have more than %d tokens (`max_tokens`)",
        *(len(examples), num_long, recipe.max_tokens),
    )
    if not examples:
        raise ValueError(
            f"{recipe.train_file} has no usable row; expected rows with a question"
            f"{' that ends with a question mark' if recipe.writes == 'question' else ''}, an answer and a passage, "
            f"which together have at most {recipe.max_tokens} tokens. Raise `max_tokens`, or choose another "
            "`train_file`."
        )
    return datasets.Dataset.from_list(examples)


def tokenize(row: Row, tokenizer, is_separate: bool = False, writes: str = "answer") -> dict[str, list[int]]:
    """Ids of the prompt and the target: the answer or, if `writes` is `"question"`, the answer and its question. Labels
    are on the target and the end of its turn. With independent passages also `passage_ids`, the number of each id's
    passage, -1 on other text."""
    mark, target = uuid.uuid4().hex if is_separate else None, row["answers"][0]
    if writes == "question":
        content, target = question_prompt(row), f"{target}\n{row['question'].strip()}"
    else:
        content = full_text(row) if mark is None else text_prompt(row, mark)
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

    # Tokenized separately, because the prompt must have exactly the ids that it has at inference.
    target_ids = ids_of(conversation.removeprefix(prompt).rstrip())
    if mark is None:
        prompt_ids, passage_ids = ids_of(prompt), {}
    else:
        parts = IndependentText.of(row, *prompt.split(mark), ids_of)
        prompt_ids, passage_ids = parts.ids, {"passage_ids": parts.passage_ids + [-1] * len(target_ids)}
    return {
        "input_ids": prompt_ids + target_ids,
        "labels": [-100] * len(prompt_ids) + target_ids,
        **passage_ids,
    }


@dataclass
class IndependentCollator:
    """Makes a right-padded batch of examples with independent passages: `input_ids`, `labels` and `position_ids`
    (batch, seq_len), and `attention_mask` (batch, 1, seq_len, seq_len), which says which token attends to which."""

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids, labels, passages = ([row[key] for row in rows] for key in ("input_ids", "labels", "passage_ids"))
        passage_ids, is_real = padded(passages, -1), padded(passages, -2) > -2
        seen = is_real[:, None, None, :].expand(-1, -1, is_real.shape[1], -1).tril()
        return {
            "input_ids": padded(ids, self.pad_token_id),
            "labels": padded(labels, -100),
            "position_ids": passage_positions(passage_ids, is_real),
            # Boolean, because the lowest float32 would overflow in the bfloat16 of autocast.
            "attention_mask": separate_passages(seen, passage_ids, torch.float32),
        }


def train(recipe: FullTextArguments, args: TextTrainingConfig, settings: str) -> None:
    """Train the LoRA, and save it in PEFT's format. The folder is locked meanwhile; `settings` are those of
    `run_settings`."""
    with claim_folder(args.output_dir, settings, is_main=args.process_index == 0):
        if Path(args.output_dir, CONFIG_NAME).exists():
            logger.info("the run in %s is finished; delete this folder to train again", args.output_dir)
            return
        model_path = resolve_model(recipe.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if args.chat_template_path is not None:
            tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        collator = None  # the one of TRL
        if recipe.passage_attention == "separate":
            collator, args.remove_unused_columns = IndependentCollator(tokenizer.pad_token_id or 0), False
        with preparation():
            train_dataset = build_dataset(recipe, tokenizer, args.seed)
        set_seed(args.seed)
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            data_collator=collator,
            peft_config=LoraConfig(
                r=recipe.lora_r, lora_alpha=recipe.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
        with write_folder_atomically(args.output_dir, last=CONFIG_NAME) as folder:
            trainer.save_model(str(folder))
        logger.info("saved the trained weights in %s", args.output_dir)


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, train)
