"""The keys of a recipe (stage, model and data, then TRL's training arguments), and the parser of recipes."""

import dataclasses
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from trl import SFTConfig, TrlParser

from ..common.files import exit_on_user_error, find_path, refuse_unknown
from ..common.rows import find_file, parse_source
from ..configuration_arcaligner import ArcAlignerConfig
from ..encoder_arcaligner import fastest_dtype
from ..loading_arcaligner import resolve_model
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import check_tokens_per_slot
from .distractors import MAX_DISTRACTORS
from .run import PreparationError, check_resume, run_settings

logger = logging.getLogger(__name__)

BASE_MODEL = "base model"


def _examples_cache() -> str:
    """The folder `examples` in `$ARCALIGNER_CACHE`; if that is not set, in `arcaligner` in the user's cache folder."""
    of_user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(os.environ.get("ARCALIGNER_CACHE") or Path(of_user, "arcaligner"), "examples"))


# The stages that a stage may start from. A stage that starts from the same stage continues it, on other data.
STARTS = {
    "reconstruction": (BASE_MODEL, "reconstruction"),
    "grounding": ("reconstruction", "grounding", BASE_MODEL),
    "gating": ("grounding", "gating"),
}
# Fields of `ArcAlignerConfig` that are set by the processor.
FROM_PROCESSOR = {"encoder_name_or_path", "encoder_hidden_size", "context_token", "context_token_id"}
# Settings of a processor that other keys of the recipe set.
_FROM_RECIPE = {
    "tokens_per_slot": "`tokens_per_slot` of the recipe",
    "trained_tokens_per_slot": "`tokens_per_slot` of the recipe",
    "context_words": "`word_parts` in `aligner`",
    "trained_encoder": "`encoder_lora_r` of the recipe",
    "chat_template": "`chat_template_path` of the recipe",
    "passage_attention": "`passage_attention` in `aligner`",
}
# In the `Args` of a docstring: the names of an entry, each with its type in brackets, and its text.
_ARGUMENT = re.compile(r"^ {4}(\w[^:\n]*): ((?:.|\n {8})*)", re.MULTILINE)

# Packed turns need a custom mask, which other attention kernels do not accept.
_MASKED_ATTENTION = (None, "eager", "sdpa")


def with_help(kind: type) -> type:
    """Class decorator for a dataclass of keys: `--help` describes each key with the text of the docstring's `Args`, or
    with that of the parent class."""
    parents = filter(dataclasses.is_dataclass, kind.__bases__)
    inherited = {field.name: field.metadata for parent in parents for field in dataclasses.fields(parent)}
    texts = {}
    for names, text in _ARGUMENT.findall(inspect.cleandoc(kind.__doc__)):
        for name in re.findall(r"\w+", re.sub(r" \([^)]*\)", "", names)):
            texts[name] = " ".join(text.split()).replace("%", "%%")  # argparse formats a help text
    for key in dataclasses.fields(kind):
        if key.name in kind.__annotations__:
            described = {"help": texts[key.name]} if key.name in texts else {}
            key.metadata = {**inherited.get(key.name, {}), **described}
    return kind


@with_help
@dataclass
class RecipeArguments:
    """
    The keys of a recipe that are not [`AlignerTrainingConfig`]'s. Paths are relative to the working directory; paths of
    data files are relative to `data_dir`.

    Args:
        stage (`str`): Stage of the training: `"reconstruction"` (I), `"grounding"` (II) or `"gating"` (III). It decides
            the data, the prompt and which parts are trained.
        model_name_or_path (`str`): A base model for the first stage, the previous stage's `output_dir` for the others.
        train_files (`dict[str, float]`): Training data, each entry with its weight: JSON Lines or Parquet files, or
            data sets of the Hub (docs/training.md describes the formats). The share of an entry in the examples is its
            weight divided by the sum of the weights.
        data_dir (`str`): Folder of the data files whose paths are relative.
        dtype (`str`): The dtype of the base model, which is not trained; the aligner is always float32. `"auto"`
            selects the faster of float32 and bfloat16.
        aligner (`dict`): Fields of `ArcAlignerConfig` to set, such as `lora_r`.
        processor (`dict`): Arguments of a new `ArcAlignerProcessor`, such as `sentences_per_segment`, for a stage that
            starts from a base model. Other stages keep the processor of the model that they start from.
        encoder_lora_r (`int`): Rank of a LoRA that trains the sentence encoder together with the aligner; 0 leaves the
            encoder frozen.
        max_train_samples (`int`, *optional*): Maximum number of examples to train on. Default: no limit.
        oversample (`bool`): Whether rows of an entry of `train_files` are used again, each time with other distractors,
            if the entry has fewer examples than its weight asks for. If false, fewer examples of all entries are used.
        eval_files (`dict[str, float]`): Data for the loss on held-out examples, with weights as in `train_files`. Of an
            entry that is also in `train_files`, only rows about held-out articles are used (`validation_share`).
        max_eval_samples (`int`, *optional*): Maximum number of examples for the loss on held-out examples. Default: no
            limit.
        max_segments (`int`): Maximum number of segments (by default sentences) of a reconstruction example.
        continues (`bool`): Whether reconstruction examples have a second chat turn, in which the model continues the
            text with the next segment.
        max_tokens (`int`, *optional*): Maximum number of tokens of an example, slots included. Longer examples are left
            out, and so are those that exceed the context length of the base model. Questions that share their
            passages are divided among several examples if they exceed the maximum together.
        passage_words (`int`): Number of words of a passage, if the data are texts, which are cut into passages.
        distractors (`float`): Share of the examples with questions, from 0 to 1, to which distractors are added: 1 to
            `max_distractors` passages that are most similar to the questions (BM25) and do not contain the answers. All
            passages of an example are in random order. With `max_questions` above 1, the example also gets a question
            about each distractor for which there is one.
        max_distractors (`int`): Maximum number of distractors of an example.
        validation_share (`float`): Share of articles (titles), from 0 to 1, that are held out from training.
        validation_seed (`int`): Seed that selects the articles that are held out.
        max_questions (`int`): Maximum number of questions about the same passages in one example, in addition to those
            about its distractors. The questions share the slots, so a passage is computed once for all of them; each
            question attends to the slots and itself.
        reconstruction_files (`dict[str, float]`): Data of the reconstruction examples in stages II and III, with
            weights as in `train_files`.
        reconstruction_share (`float`): Share of reconstruction examples, from 0 to 1, in the training set of stages II
            and III.
        tokens_per_slot (`list`): Numbers of tokens that a slot replaces, or `"segment"` for one slot per segment. One
            entry is drawn for each batch; an entry that is listed twice is drawn twice as often. The entries may
            differ from those of the stage before.
        attn_implementation (`str`, *optional*): Attention kernel, by its name in transformers, such as `"sdpa"`. On
            CPUs, the backward pass of `"eager"` is two to three times as fast as that of `"sdpa"` for examples of a few
            hundred tokens. Default: transformers chooses.
        compile_layers (`bool`): Whether the decoder layers are compiled, which takes a minute once and saves time in
            long runs.
        passages_first (`bool`): Whether a step computes the slots of all passages first and then the questions that
            attend to them, so that several passages share a row of a batch. Only for independent passages
            (`passage_attention: separate`) and one process.
        attention_loss_weight (`float`): With `passages_first`, the weight of the attention loss. This loss is low if
            attention goes to the passages with the answer; see `train/passages_first.py`.
        attention_loss_layers (`list[int]`): Numbers, from 0, of the layers to which the attention loss applies.
        examples_cache_dir (`str`): Folder in which tokenized examples are cached. All stages share it.
    """

    stage: Literal["reconstruction", "grounding", "gating"]
    model_name_or_path: str
    train_files: dict[str, float]
    data_dir: str = "data"
    dtype: str = "float32"
    aligner: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    encoder_lora_r: int = 0
    max_train_samples: int | None = None
    oversample: bool = False
    eval_files: dict[str, float] = field(default_factory=dict)
    max_eval_samples: int | None = None
    max_segments: int = 1
    continues: bool = False
    max_tokens: int | None = None
    passage_words: int = 100
    distractors: float = 0.0
    max_distractors: int = 4
    validation_share: float = 0.0
    validation_seed: int = 0
    max_questions: int = 1
    reconstruction_files: dict[str, float] = field(default_factory=dict)
    reconstruction_share: float = 0.0
    tokens_per_slot: list[str] = field(default_factory=lambda: ["segment"])
    attn_implementation: str | None = None
    compile_layers: bool = False
    passages_first: bool = False
    attention_loss_weight: float = 0.0
    attention_loss_layers: list[int] = field(default_factory=list)
    examples_cache_dir: str = field(default_factory=_examples_cache)

    def __post_init__(self):
        # On the command line the entries are texts, in a recipe they may be numbers.
        self.tokens_per_slot = [int(entry) if str(entry).isdecimal() else entry for entry in self.tokens_per_slot]
        if not self.tokens_per_slot:
            raise ValueError('`tokens_per_slot` is empty; expected at least one entry, such as ["segment"].')
        for entry in self.tokens_per_slot:
            check_tokens_per_slot(entry)
        refuse_unknown("`aligner`", self.aligner, [f.name for f in dataclasses.fields(ArcAlignerConfig)])
        refuse_unknown("`processor`", self.processor, inspect.signature(ArcAlignerProcessor).parameters)
        for key in self.aligner.keys() & FROM_PROCESSOR:
            raise ValueError(f"`{key}` is in `aligner`, but belongs in `processor`. Move it there.")
        for key in self.processor.keys() & _FROM_RECIPE.keys():
            raise ValueError(
                f"`{key}` is in `processor`, but follows from another key. Set {_FROM_RECIPE[key]} instead."
            )
        if self.has_turns and self.attn_implementation not in _MASKED_ATTENTION:
            raise ValueError(
                f"`attn_implementation` is {self.attn_implementation!r}, which does not support examples with several "
                "chat turns (`max_questions` or `continues`). Set `attn_implementation` to 'eager' or 'sdpa', or leave "
                "`max_questions` and `continues` out."
            )
        for key in ("max_questions", "max_segments", "passage_words"):
            if getattr(self, key) < 1:
                raise ValueError(f"`{key}` is {getattr(self, key)}; expected a number of at least 1.")
        if not 0.0 <= self.distractors <= 1.0:
            raise ValueError(f"`distractors` is {self.distractors}; expected a share of the examples, from 0 to 1.")
        if not 1 <= self.max_distractors <= MAX_DISTRACTORS:
            raise ValueError(
                f"`max_distractors` is {self.max_distractors}; expected a number from 1 to {MAX_DISTRACTORS}."
            )
        for key in ("validation_share", "reconstruction_share"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"`{key}` is {getattr(self, key)}; expected a share of at least 0 and less than 1.")
        self._check_passages_first()
        if self.distractors and not self.asks_questions:
            raise ValueError(
                f"`distractors` is {self.distractors}, but stage `{self.stage}` has no questions to find distractors "
                "for. Leave `distractors` out."
            )
        if self.reconstruction_share and not self.reconstruction_files:
            raise ValueError(
                f"`reconstruction_share` is {self.reconstruction_share}, but `reconstruction_files` is empty. Add "
                "files of passages to `reconstruction_files`, or leave `reconstruction_share` out."
            )

    def _check_passages_first(self) -> None:
        if self.passages_first and num_processes() > 1:
            raise ValueError(
                f"{num_processes()} processes were started, but `passages_first` trains in one process only. Start one "
                "process, or leave `passages_first` out."
            )
        if not self.attention_loss_weight:
            return
        if not self.passages_first:
            raise ValueError(
                f"`attention_loss_weight` is {self.attention_loss_weight}, but `passages_first` is false. Set "
                "`passages_first: true`, or leave `attention_loss_weight` out."
            )
        if not self.attention_loss_layers:
            raise ValueError(
                f"`attention_loss_weight` is {self.attention_loss_weight}, but `attention_loss_layers` is empty. Set "
                "`attention_loss_layers` to numbers of layers, such as [20, 21], or leave `attention_loss_weight` out."
            )
        if self.compile_layers and self.attn_implementation != "eager":
            raise ValueError(
                "`compile_layers` is true, but compiled layers do not compute the attention loss with "
                f"`attn_implementation: {self.attn_implementation}`. Set `attn_implementation` to `eager`, or leave "
                "`compile_layers` out."
            )

    @property
    def sources(self) -> list[str]:
        """All data that the recipe names."""
        return [*self.training_sources, *self.eval_files]

    @property
    def training_sources(self) -> list[str]:
        """The data that the recipe trains on."""
        return [*self.train_files, *self.reconstruction_files]

    @property
    def has_turns(self) -> bool:
        """Whether several turns may share the same slots."""
        return self.continues or self.max_questions > 1

    @property
    def asks_questions(self) -> bool:
        """Whether the stage's examples are questions. If not, they are texts to reconstruct."""
        return self.stage in ("grounding", "gating")

    def token_limit(self) -> int:
        """Maximum number of tokens of an example: `max_tokens`, at most the context length of the base model."""
        config = ArcAlignerConfig.from_pretrained(resolve_model(self.model_name_or_path)).text_config
        limits = [config.max_position_embeddings]
        if self.max_tokens is not None:
            limits.append(self.max_tokens)
        if self.has_turns and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            limits.append(config.sliding_window)  # the mask of packed turns has no window
        return min(limits)


def num_processes() -> int:
    """Processes that train together, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation_steps(global_batch_size: int, per_device: int, processes: int) -> int:
    """How many batches of `per_device` examples each process accumulates before an optimizer step.

    >>> accumulation_steps(256, 8, 4)
    8

    Raises:
        `ValueError`: `global_batch_size` cannot be divided so; the message lists numbers that are possible. A
            `per_device` below 1.
    """
    if min(global_batch_size, per_device) > 0 and global_batch_size % (per_device * processes) == 0:
        return global_batch_size // (per_device * processes)
    if per_device < 1:
        raise ValueError(f"`per_device_train_batch_size` is {per_device}; expected a number of at least 1.")
    sizes = [size for size in range(1, global_batch_size + 1) if global_batch_size % (size * processes) == 0]
    at_most = global_batch_size // per_device
    numbers = [number for number in range(1, at_most + 1) if global_batch_size % (per_device * number) == 0]
    remedies = [f"`per_device_train_batch_size` to {_listed(sizes)}"] if sizes else []
    remedies += [f"the number of processes to {_listed(numbers)}"] if numbers else []
    raise ValueError(
        f"`global_batch_size` is {global_batch_size}; expected a positive multiple of {per_device * processes}, which "
        f"is `per_device_train_batch_size` ({per_device}) times the number of processes ({processes}). Change "
        f"{', or '.join([*remedies, '`global_batch_size`'])}."
    )


def _listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def check_devices(needs_bfloat16: bool) -> None:
    """Check that each process has an accelerator that no other uses, and that it computes in bfloat16 if needed.

    Raises:
        `ValueError`: otherwise; the message says what to do.
    """
    count, local = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count > 1 and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"This machine has {count} GPUs, but only one process would train. Train on all of them with `arcaligner "
            "train --accelerate ddp`, or on one with `CUDA_VISIBLE_DEVICES=0` before the command."
        )
    if 0 < count < local:
        raise ValueError(
            f"{local} processes were started on a machine with {count} GPU{'s' * (count > 1)}, but each process needs "
            f"its own GPU. Set `num_processes: {count}` in the configuration of accelerate, or pass `--num_processes "
            f"{count}` to `accelerate launch`."
        )
    if needs_bfloat16:
        check_bfloat16()


def check_bfloat16() -> None:
    """Raises `ValueError` on a GPU that does not compute in bfloat16, such as a V100 or T4."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"{torch.cuda.get_device_name()} does not compute in bfloat16. Use another GPU, or train in float32, which "
            "takes twice the memory: `arcaligner train ... -- --bf16 false --dtype float32`."
        )


@with_help
@dataclass
class TextTrainingConfig(SFTConfig):
    """`SFTConfig` for the baselines, whose examples are too short to need activation checkpointing. It is off by
    default here; in TRL it is on. transformers renamed the key, so a recipe for all versions can contain neither
    name."""

    gradient_checkpointing: bool | None = None
    max_length: int | None = None  # TRL would cut answers off

    def __post_init__(self):
        if self.max_length or self.packing:
            key = "max_length" if self.max_length else "packing"
            raise ValueError(
                f"`{key}` is {getattr(self, key)}, but this script neither truncates nor packs examples. Leave `{key}` "
                "out. To leave out examples that are too long, set `max_tokens`."
            )
        super().__post_init__()


@with_help
@dataclass
class AlignerTrainingConfig(SFTConfig):
    """
    `SFTConfig` with the few values that slots need.

    Defaults that differ from [`~trl.SFTConfig`]: `max_length=None` and `remove_unused_columns=False` (truncated rows
    and dropped columns lose slots), `dataset_kwargs={"skip_prepare_dataset": True}` (rows come tokenized),
    `gradient_checkpointing=None` (off), `ddp_find_unused_parameters=False`,
    `train_sampling_strategy="group_by_length"`, `loss_type="nll"` (the model's own loss), `ddp_timeout` of a day (the
    first process tokenizes while the others wait).

    Args:
        global_batch_size (`int`, *optional*): Examples per optimizer step, whatever the number of processes;
            `gradient_accumulation_steps` follows from it. Default: the product of `per_device_train_batch_size`,
            `gradient_accumulation_steps` and the number of processes.
        batch_tokens (`int`, *optional*): Maximum number of positions (tokens and slots) of a batch, padding included.
            Each batch then has as many examples as fit, instead of `per_device_train_batch_size`. Needs `max_steps`
            and one process; the whole run counts as one epoch.
        max_seconds (`float`, *optional*): End the training after this time, counted from its first step, if `max_steps`
            has not ended it before. The learning rate then falls with the time: at half of the time it is what it would
            be at half of the steps, a warmup included; so give `warmup_steps` as a share of the steps (below 1).
            Checkpoints store the time, so a resumed run continues to count. Needs one process. Default: no limit.
        gate_learning_rate (`float`, *optional*): Learning rate of the gates, which start untrained in stage III.
            Default: `learning_rate`.
        encoder_learning_rate (`float`, *optional*): Learning rate of the encoder's LoRA (`encoder_lora_r`). Default:
            `learning_rate`.
        average_checkpoints (`int`): Number of the last checkpoints whose weights are averaged at the end of the stage;
            the stage's result has the mean weights (latest weight averaging,
            https://huggingface.co/papers/2209.14981). With a constant learning rate, the averaging replaces a decay of
            the learning rate. With 0 the result has the weights of the last step.
        eval_slot_gap (`bool`): Whether each evaluation also computes the loss with the slots of other examples. The
            difference of the two losses is logged as `eval_slot_gap`; a large one means that slots convey content.
    """

    max_length: int | None = None
    remove_unused_columns: bool = False
    gradient_checkpointing: bool | None = None  # `activation_checkpointing` is its new name
    ddp_find_unused_parameters: bool | None = False  # each stage trains all that it unfreezes
    ddp_timeout: int = 24 * 3600
    train_sampling_strategy: str = "group_by_length"
    loss_type: str = "nll"  # the model's own; TRL's former default replaces the model's forward
    global_batch_size: int | None = None
    batch_tokens: int | None = None
    max_seconds: float | None = None
    gate_learning_rate: float | None = None
    encoder_learning_rate: float | None = None
    average_checkpoints: int = 0
    eval_slot_gap: bool = False

    def __post_init__(self):
        if not self.use_cpu:
            check_devices(needs_bfloat16=bool(self.bf16))
        if self.global_batch_size is not None:
            processes = num_processes()
            if self.gradient_accumulation_steps != 1:
                raise ValueError(
                    f"`global_batch_size` is {self.global_batch_size} and `gradient_accumulation_steps` is "
                    f"{self.gradient_accumulation_steps}, but the second follows from the first. Leave one of the two "
                    "out."
                )
            self.gradient_accumulation_steps = accumulation_steps(
                self.global_batch_size, self.per_device_train_batch_size, processes
            )
            logger.info(
                "examples per optimizer step: %d (processes: %d, accumulated batches: %d, examples of a batch: %d)",
                *(self.global_batch_size, processes, self.gradient_accumulation_steps),
                self.per_device_train_batch_size,
            )
        self._check_batch_tokens()
        self._check_max_seconds()
        self.dataset_kwargs = {"skip_prepare_dataset": True} | (self.dataset_kwargs or {})
        refused = {
            "packing": self.packing,
            "padding_free": self.padding_free,
            "max_length": self.max_length,
            "remove_unused_columns": self.remove_unused_columns,
        }
        wrong = {name: value for name, value in refused.items() if value}
        if wrong:
            advice = " To exclude examples that are too long, set `max_tokens`." if "max_length" in wrong else ""
            raise ValueError(
                f"{' and '.join(f'`{name}={value}`' for name, value in wrong.items())} would remove or move tokens of "
                "an example, so that its slots would no longer match their embeddings. Leave "
                f"{' and '.join(f'`{name}`' for name in wrong)} out.{advice}"
            )
        if self.eval_slot_gap and self.per_device_eval_batch_size < 2:
            raise ValueError(
                "`eval_slot_gap` swaps slots between the examples of a batch, but `per_device_eval_batch_size` is "
                f"{self.per_device_eval_batch_size}. Set `per_device_eval_batch_size` to 2 or more, or leave "
                "`eval_slot_gap` out."
            )
        mean, num_saved = self.average_checkpoints, self.save_total_limit
        if mean < 0:
            raise ValueError(f"`average_checkpoints` is {mean}; expected a number of at least 0.")
        if mean and self.save_strategy == "no":
            raise ValueError(
                f"`average_checkpoints` is {mean}, but `save_strategy` is 'no', so no checkpoints are saved. Set "
                "`save_strategy` to 'steps' or 'epoch', or `average_checkpoints` to 0."
            )
        if num_saved is not None and 0 < num_saved < mean:  # 0 is no limit
            raise ValueError(
                f"`average_checkpoints` is {mean}, but `save_total_limit` is {num_saved}, so only the last {num_saved} "
                f"are kept. Set `save_total_limit` to at least {mean}, or `average_checkpoints` to 0."
            )
        super().__post_init__()

    def _check_max_seconds(self) -> None:
        if self.max_seconds is None:
            return
        if not 0 < self.max_seconds < math.inf:
            raise ValueError(f"`max_seconds` is {self.max_seconds}; expected a number of seconds above 0.")
        if num_processes() > 1:
            raise ValueError(
                f"{num_processes()} processes were started, but with `max_seconds` the training needs one process, "
                "because the clocks of several differ. Start one process, or leave `max_seconds` out."
            )
        if self.restore_callback_states_from_checkpoint:
            raise ValueError(
                "`restore_callback_states_from_checkpoint` is true, but with `max_seconds` the time of a checkpoint is "
                "restored without it. Leave `restore_callback_states_from_checkpoint` out."
            )

    def _check_batch_tokens(self) -> None:
        if self.batch_tokens is None:
            return
        if self.batch_tokens < 1:
            raise ValueError(
                f"`batch_tokens` is {self.batch_tokens}; expected a maximum number of positions, 1 or more."
            )
        if self.max_steps <= 0:
            raise ValueError(
                f"`max_steps` is {self.max_steps}, but `batch_tokens` needs a number of steps, because the number of "
                "batches of an epoch varies. Set `max_steps` to a number above 0."
            )
        if self.global_batch_size is not None:
            raise ValueError(
                f"`global_batch_size` is {self.global_batch_size}, but with `batch_tokens` the number of examples per "
                "step varies. Leave one of the two out."
            )
        if num_processes() > 1:
            raise ValueError(
                f"{num_processes()} processes were started, but `batch_tokens` trains in one process only. Start one "
                "process, or leave `batch_tokens` out."
            )


class RecipeParser(TrlParser):
    """`TrlParser` that suggests the known key for a misspelled one."""

    @property
    def keys(self) -> list[str]:
        return [field.name for kind in self.dataclass_types for field in dataclasses.fields(kind)]

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        refuse_unknown("the recipe", kwargs, self.keys, "`--help` lists the known keys.")
        return super().set_defaults_with_config(**kwargs)

    def parse_args_into_dataclasses(self, args: list[str], **kwargs: Any) -> tuple:
        flags = [argument.split("=")[0][2:].replace("-", "_") for argument in args if argument.startswith("--")]
        flags = [flag for flag in flags if flag != "help" and flag.removeprefix("no_") not in self.keys]
        refuse_unknown("the command line", flags, self.keys, "`--help` lists the known keys.")
        return super().parse_args_into_dataclasses(args=args, **kwargs)


def parse_recipe(script: str, kinds: tuple[type, type], arguments: list[str]) -> tuple[Any, Any, str]:
    """The recipe that `--config` names, overridden by the command line, as arguments of the two `kinds`, and the text
    of [`run_settings`] for `script`."""
    try:
        recipe, args = RecipeParser(kinds).parse_args_and_config(arguments)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no recipe file {error.filename}. Pass an existing file with `--config`; the recipes of this "
            f"package are in {Path(__file__).parent / 'recipes'}."
        ) from error
    if isinstance(recipe, RecipeArguments) and args.eval_strategy != "no" and not recipe.eval_files:
        raise ValueError(
            f"`eval_strategy` is {args.eval_strategy.value!r}, but the recipe has no `eval_files`. Add `eval_files`, "
            'or set `eval_strategy` to "no".'
        )
    check_resume(args.resume_from_checkpoint, args.output_dir, is_stage=isinstance(recipe, RecipeArguments))
    if args.chat_template_path is not None:
        args.chat_template_path = str(find_path(args.chat_template_path))
    return recipe, args, run_settings(script, arguments)


def run_script(script: str, kinds: tuple[type, type], main: Callable) -> None:
    """Run a training script with the arguments that [`parse_recipe`] reads from the command line. A mistake in the
    recipe or in the data is reported in one line before training begins, and a missing file before anything is loaded.
    An error in training ends in a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with exit_on_user_error():
        recipe, args, settings = parse_recipe(script, kinds, sys.argv[1:])
        for path, _ in map(parse_source, recipe.sources):
            find_file(path, recipe.data_dir)
    with exit_on_user_error(PreparationError):
        main(recipe, args, settings)


def resolve_dtype(name: str, device: torch.device, checkpoint: str | None = None) -> torch.dtype:
    """The dtype that a recipe names. `"auto"` is the dtype of the checkpoint to resume from or, without one, the
    fastest; it is the same in all processes."""
    if name == "auto" and checkpoint is not None:
        return ArcAlignerConfig.from_pretrained(checkpoint).dtype
    if name == "auto":
        dtype = broadcast_object_list([fastest_dtype(device.type)])[0]
        logger.info("`dtype` is auto, which is %s on this machine", dtype)
        return dtype
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"`dtype` is {name!r}; expected auto, float32, bfloat16 or another float dtype of torch.")
    if dtype == torch.bfloat16 and device.type == "cuda":
        check_bfloat16()
    return dtype


def check_start(recipe: RecipeArguments, processor: ArcAlignerProcessor, start: ArcAlignerConfig | None) -> None:
    """Raises `ValueError` for a stage out of order, and for a `start` (`None` for a base model) with another encoder or
    segmentation than the recipe's.
    """
    name = recipe.model_name_or_path
    start_stage = BASE_MODEL if start is None else start.training_stage
    if start_stage is not None and start_stage not in STARTS[recipe.stage]:  # a checkpoint made by hand names no stage
        kind, *expected = (
            f"a {start}" if start == BASE_MODEL else f"the result of stage `{start}`"
            for start in (start_stage, *STARTS[recipe.stage])
        )
        raise ValueError(
            f"Stage `{recipe.stage}` cannot start from {name}, which is {kind}; expected {' or '.join(expected)}. Set "
            "`model_name_or_path` to such a model; the result of a finished stage is in its `output_dir`."
        )
    if start is None:
        return
    of_start = {key: getattr(processor, key) for key in recipe.processor}
    of_start |= {key: getattr(start, key) for key in recipe.aligner.keys() & {"base_model_name_or_path"}}
    for key, was in of_start.items():
        wanted = (recipe.processor | recipe.aligner)[key]
        if wanted != was:
            raise ValueError(
                f"`{key}` is {wanted!r} in the recipe, but {name}, from which this stage starts, was trained with "
                f"{was!r}. Leave `{key}` out, or train again from stage I with the new value."
            )
