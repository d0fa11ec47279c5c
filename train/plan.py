"""What a recipe needs, estimated without loading a model: `arcaligner train --recipe mistral_7b --dry-run`.

Parameters are counted on the meta device. If a model is not on this machine, `published.yaml` or the Hub gives its
sizes. If the data are files, a first block of examples is made and measured. The memory of activations is an estimate.
On one H200 with a 7B backbone it differed from the measured memory by less than a fifth.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ..common.rows import FILES, find_file, parse_source
from ..configuration_arcaligner import DEFAULT_ENCODER, ArcAlignerConfig
from ..loading_arcaligner import resolve_model
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .examples import ExampleBuilder, ExampleSelector
from .recipe import AlignerTrainingConfig, RecipeArguments, accumulation_steps, check_bfloat16, parse_recipe
from .run import SCRIPT
from .stages import Stage

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
GIB, GB = 2**30, 1e9
# Mean number of positions of an example with Mistral's tokenizer and one slot per sentence. Reconstruction: paragraphs
# of Wikipedia in passages of 100 words. The other stages: questions of HotpotQA with the paragraphs that answer them.
TYPICAL_TOKENS = {"reconstruction": 104, "grounding": 54, "gating": 54}
# Share of a row's positions that are slots: with several tokens per slot, and with one slot per sentence.
SLOT_SHARE, SENTENCE_SLOT_SHARE = 0.9, 0.2
TOKENS_OF_A_SENTENCE = 30
# Activations that stage III keeps for the backward pass, relative to stage II. It runs layers several times.
GATING_FACTOR = 1.7
BYTES_OF_A_WORD = 6
# Settings of a checkpoint that the size of its aligner depends on.
OF_CHECKPOINTS = ("lora_r", "lora_target_modules", "gate_layers", "gate_hidden_size", "word_parts")


@dataclass(frozen=True)
class Examples:
    """A stage's examples: how many, their mean length, and the longest that the recipe allows, in tokens."""

    number: int | None
    mean: float
    longest: int
    is_measured: bool


@dataclass(frozen=True)
class Memory:
    """Memory of a training step on one GPU, in bytes."""

    backbone: int
    encoder: int
    aligner: int  # float32 weights, gradients and Adam's two moments: 16 bytes each
    activations: int
    with_checkpointing: int  # activations with gradient checkpointing

    @property
    def fixed(self) -> int:
        return self.backbone + self.encoder + self.aligner


@dataclass(frozen=True)
class StagePlan:
    """Requirements of one stage on `num_gpus`."""

    name: str
    start: str
    num_trained: int
    memory: Memory
    activation_checkpointing: bool
    examples: Examples
    steps: int | None
    max_seconds: float | None  # of the training
    per_device: int
    batch_tokens: int | None  # of a batch, instead of `per_device` examples
    accumulated: int
    num_gpus: int
    gigabytes: dict[str, float]  # of disk

    @property
    def global_batch(self) -> int:
        return self.per_device * self.accumulated * self.num_gpus

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an optimizer step on each GPU."""
        positions = self.per_device * self.examples.mean if self.batch_tokens is None else self.batch_tokens
        return positions * self.accumulated

    @property
    def bytes_needed(self) -> int:
        memory = self.memory
        return memory.fixed + (memory.with_checkpointing if self.activation_checkpointing else memory.activations)

    def hours(self, tokens_per_second: float) -> float | None:
        """Hours of training with `tokens_per_second` on each GPU; `None` if neither steps nor time are limited by a
        known number."""
        limits = [] if self.max_seconds is None else [self.max_seconds / 3600]
        if self.steps is not None:
            limits.append(self.steps * self.tokens_per_step / tokens_per_second / 3600)
        return min(limits, default=None)


# Models


def model_config(name: str) -> PreTrainedConfig:
    """A model's configuration: from this machine, from `published.yaml`, or from the Hub.

    Raises:
        `ValueError`: a model whose sizes are not known here.
    """
    path = resolve_model(name)
    if not Path(path).is_dir() and name in PUBLISHED["models"]:
        return AutoConfig.for_model(**PUBLISHED["models"][name])
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(
            f"The configuration of {name} is neither on this machine nor in train/published.yaml, and the Hub did not "
            f"return it ({str(error).splitlines()[0]}). Check the name. For a gated model, accept its licence on the "
            "Hub and run `hf auth login`."
        ) from error


def num_parameters(config: PreTrainedConfig) -> int:
    """Parameters of a model without a head."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())


def num_encoder_lora(config: PreTrainedConfig, rank: int) -> int:
    """Parameters of LoRA on all linear layers of an encoder, without its pooler."""
    with torch.device("meta"):
        modules = [*AutoModel.from_config(config).named_modules()]
    linears = [module for name, module in modules if type(module) is torch.nn.Linear and "pooler" not in name]
    return sum(rank * (linear.in_features + linear.out_features) for linear in linears)


def empty_aligner(text_config: PreTrainedConfig, stage: str, **settings: Any) -> ArcAlignerForCausalLM:
    """An aligner on the meta device as a stage trains it."""
    with torch.device("meta"):
        model = ArcAlignerForCausalLM(ArcAlignerConfig(text_config=text_config.to_dict(), **settings))
    model.set_stage(stage)
    return model


def activation_bytes(config: PreTrainedConfig, positions: int, slots: int, itemsize: int, layers: int) -> int:
    """Bytes that a frozen decoder or encoder keeps for the backward pass. For each position: two norms that compute in
    float32, queries, keys, values and three products of the MLP. For each slot: the float32 inputs of LoRA."""
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    of_position = (6 * hidden + 3 * inner) * itemsize
    of_slot = 4 * (6 * hidden + inner)
    return layers * (positions * of_position + slots * of_slot)


def stage_memory(
    recipe: RecipeArguments,
    args: AlignerTrainingConfig,
    model: ArcAlignerForCausalLM,
    encoder: PreTrainedConfig,
    longest: int,
) -> tuple[Memory, int]:
    """Memory of a step with the longest rows, and the number of trained parameters, the encoder's LoRA included."""
    config, itemsize = model.config.text_config, _itemsize(recipe)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for name, parameter in model.named_parameters() if not model.is_aligner_key(name))
    idle = sum(parameter.numel() for _, parameter in model.aligner_parameters()) - trained
    of_encoder = num_encoder_lora(encoder, recipe.encoder_lora_r) if recipe.encoder_lora_r else 0
    positions = args.batch_tokens or args.per_device_train_batch_size * longest
    finest = min((entry for entry in recipe.tokens_per_slot if entry != "segment"), default=None)
    slots = round(positions * (SENTENCE_SLOT_SHARE if finest is None else SLOT_SHARE))
    layers, factor = config.num_hidden_layers, GATING_FACTOR if recipe.stage == "gating" else 1.0
    stored = factor * activation_bytes(config, positions, slots, itemsize, layers)
    again = layers * positions * config.hidden_size * itemsize
    again += factor * activation_bytes(config, positions, slots, itemsize, 1)
    if recipe.encoder_lora_r:
        encoder_positions = slots * (finest or TOKENS_OF_A_SENTENCE)
        sizes = encoder_positions, encoder_positions, itemsize, encoder.num_hidden_layers
        encoder_bytes = activation_bytes(encoder, *sizes)
        stored, again = stored + encoder_bytes, again + encoder_bytes
    memory = Memory(
        backbone=frozen * itemsize,
        encoder=num_parameters(encoder) * itemsize,
        aligner=16 * (trained + of_encoder) + 4 * idle,
        activations=round(stored),
        with_checkpointing=round(again),
    )
    return memory, trained + of_encoder


def _itemsize(recipe: RecipeArguments) -> int:
    """Bytes of a weight of the backbone; `"auto"` is bfloat16 on a GPU."""
    return 2 if recipe.dtype == "auto" else getattr(torch, recipe.dtype).itemsize


# Examples


def stage_examples(recipe: RecipeArguments, args: AlignerTrainingConfig, base: str, settings: dict) -> Examples:
    """A stage's examples, measured if all of its sources are files and the base model's tokenizer is on this
    machine."""
    config = model_config(base)
    longest = min(filter(None, (recipe.max_tokens, getattr(config, "max_position_embeddings", None))))
    here = all(parse_source(source)[0].endswith(FILES) for source in recipe.train_files)
    if not (here and Path(resolve_model(base)).is_dir()):
        mean = min(TYPICAL_TOKENS[recipe.stage], longest)
        return Examples(recipe.max_train_samples, mean, longest, is_measured=False)
    words = bool(settings["aligner"].get("word_parts"))
    processor = ArcAlignerProcessor.from_base_model(base, context_words=words, **settings["processor"])
    if args.chat_template_path is not None:
        processor.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        processor.tokenizer.chat_template = processor.chat_template
    builder = ExampleBuilder(processor, recipe.max_segments, recipe.continues, recipe.tokens_per_slot, longest)
    selector = ExampleSelector(recipe, builder, args.seed, args.dataset_num_proc)
    total, sizes, mean = sum(recipe.train_files.values()), [], 0.0
    for source, weight in recipe.train_files.items():
        number, lengths = selector.preview(source)
        sizes.append(number * total / weight)
        mean += weight / total * sum(lengths) / max(1, len(lengths))
    number = (max if recipe.oversample else min)(sizes) / (1 - recipe.reconstruction_share)
    number = round(min(number, recipe.max_train_samples or math.inf))
    return Examples(number, mean, longest, is_measured=True)


# Stages


def plan_stages(stages: list[Stage], only: int | None, num_gpus: int) -> list[StagePlan]:
    """What the stages of a recipe need, or one of them.

    Args:
        stages (`list[Stage]`): All stages of the recipe, from `read_stages`; the size of a stage's aligner may be set
            by an earlier one.
        only (`int`, *optional*): Number of the one stage to plan.
        num_gpus (`int`): Number of GPUs that train.

    Raises:
        `FileNotFoundError`: a data file that does not exist.
        `ValueError`: a `global_batch_size` that cannot be divided among the GPUs; a model whose sizes are not known.
    """
    # Otherwise it would log the accumulation for this machine.
    logging.getLogger(parse_recipe.__module__).setLevel(logging.WARNING)
    plans, base, settings = [], "", {}
    for stage in stages:
        kinds = (RecipeArguments, AlignerTrainingConfig)
        # Nothing runs, so this machine's accelerators are not checked.
        recipe, args, _ = parse_recipe(SCRIPT, kinds, [*stage.arguments, "--use_cpu", "true"])
        if stage.start is None:
            base, settings = _start(recipe.model_name_or_path)
        for key in settings:
            settings[key] |= getattr(recipe, key)
        if only in (None, stage.number):
            for path, _ in map(parse_source, recipe.sources):
                find_file(path, recipe.data_dir)
            plans.append(_plan(stage, recipe, args, base, settings, num_gpus))
    return plans


def _start(name: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The base model that a stage starts from, with the settings of aligner and processor if the start is a
    checkpoint."""
    folder = resolve_model(name)
    if not Path(folder, "config.json").is_file():
        return name, {"aligner": {}, "processor": {}}
    config = ArcAlignerConfig.from_pretrained(folder)
    if config.training_stage is None:
        return name, {"aligner": {}, "processor": {}}
    aligner = {key: getattr(config, key) for key in OF_CHECKPOINTS}
    encoder = {key: getattr(config, key) for key in ("encoder_name_or_path", "encoder_hidden_size")}
    return config.base_model_name_or_path or name, {"aligner": aligner, "processor": encoder}


def _plan(
    stage: Stage, recipe: RecipeArguments, args: AlignerTrainingConfig, base: str, settings: dict, num_gpus: int
) -> StagePlan:
    per_device = args.per_device_train_batch_size
    accumulated = args.gradient_accumulation_steps
    if args.global_batch_size is not None:
        accumulated = accumulation_steps(args.global_batch_size, per_device, num_gpus)
    if recipe.dtype == "bfloat16":
        check_bfloat16()
    backbone = model_config(base)
    encoder = model_config(settings["processor"].get("encoder_name_or_path", DEFAULT_ENCODER))
    width = {"encoder_hidden_size": settings["processor"].get("encoder_hidden_size", 384)}
    model = empty_aligner(backbone, recipe.stage, **width, **settings["aligner"])
    examples = stage_examples(recipe, args, base, settings)
    memory, num_trained = stage_memory(recipe, args, model, encoder, examples.longest)
    steps = args.max_steps if args.max_steps > 0 else None
    if steps is None and examples.number is not None:
        steps = math.ceil(math.ceil(examples.number / (per_device * num_gpus * accumulated)) * args.num_train_epochs)
    return StagePlan(
        name=stage.name,
        start=recipe.model_name_or_path,
        num_trained=num_trained,
        memory=memory,
        activation_checkpointing=bool(args.gradient_checkpointing),  # all versions have the old name
        examples=examples,
        steps=steps,
        max_seconds=args.max_seconds,
        per_device=per_device,
        batch_tokens=args.batch_tokens,
        accumulated=accumulated,
        num_gpus=num_gpus,
        gigabytes=_disk(recipe, args, memory, num_trained, examples, steps),
    )


def _disk(recipe, args, memory: Memory, num_trained: int, examples: Examples, steps: int | None) -> dict[str, float]:
    """Gigabytes of models, of data of the Hub, of examples and of checkpoints."""
    gigabytes = {"base model": memory.backbone / GB, "encoder": memory.encoder / GB}
    downloaded = 0.0
    for source in recipe.sources:
        path, options = parse_source(source)
        sizes = PUBLISHED["data_sets"].get(f"{path}?name={options['name']}")
        if sizes is None or path.endswith(FILES):
            continue
        texts = math.inf
        if recipe.max_train_samples is not None and not recipe.asks_questions:  # streamed from the Hub
            texts = recipe.max_train_samples * recipe.passage_words * BYTES_OF_A_WORD / GB
        downloaded = max(downloaded, min(sizes["download"], texts))
    if downloaded:
        gigabytes["downloaded data"] = downloaded
    if examples.number is not None:
        gigabytes["examples"] = 16 * examples.number * examples.mean / GB
    saved = 0 if args.save_strategy == "no" else (args.save_total_limit or 0)
    if not saved and steps is not None and args.save_strategy == "steps":
        saved = max(1, steps // max(1, int(args.save_steps)))
    gigabytes["checkpoints"] = (12 * saved + 4) * num_trained / GB  # weights and Adam's moments; a result: weights
    return gigabytes


# Text


def lines_of(plans: list[StagePlan], tokens_per_second: float | None = None) -> list[str]:
    """The plans as lines of text."""
    lines = []
    for plan in plans:
        memory, examples = plan.memory, plan.examples
        how = (
            "measured on a sample"
            if examples.is_measured
            else "assumed, because the data or the tokenizer is not on this machine"
        )
        number = "all" if examples.number is None else f"{examples.number:,}"
        checkpointed = memory.fixed + memory.with_checkpointing
        checkpointing = "on" if plan.activation_checkpointing else "off"
        activations = memory.with_checkpointing if plan.activation_checkpointing else memory.activations
        disk = ", ".join(f"{name} {size:.1f}" for name, size in plan.gigabytes.items())
        rows = {
            "starts from": plan.start,
            "trained": f"{plan.num_trained / 1e6:.1f} million parameters",
            "examples": f"{number}; {examples.mean:.0f} tokens on average ({how}), at most {examples.longest}",
            "optimizer step": _step_of(plan),
            "steps": _steps_of(plan),
            "memory per GPU": f"{plan.bytes_needed / GIB:.1f} GiB with activation checkpointing {checkpointing}: "
            f"base model {memory.backbone / GIB:.1f}, encoder {memory.encoder / GIB:.1f}, aligner with gradients and "
            f"Adam's moments {memory.aligner / GIB:.1f}, activations of the longest examples {activations / GIB:.1f}",
            "with checkpointing": f"{checkpointed / GIB:.1f} GiB, of which activations "
            f"{memory.with_checkpointing / GIB:.1f}",
            "disk": f"{sum(plan.gigabytes.values()):.1f} GB: {disk}",
        }
        if tokens_per_second is not None:
            hours = plan.hours(tokens_per_second)
            rows["time"] = (
                "unknown" if hours is None else f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
            )
            rows["time"] += f" at {tokens_per_second:,.0f} tokens a second on each GPU"
        lines += [plan.name, *(f"  {name:<19}{text}" for name, text in rows.items()), ""]
    return [*lines, *_of_this_machine(plans)]


def _steps_of(plan: StagePlan) -> str:
    steps = "unknown" if plan.steps is None else f"{plan.steps:,}"
    return steps if plan.max_seconds is None else f"{steps}, or as many as {plan.max_seconds:g} seconds allow"


def _step_of(plan: StagePlan) -> str:
    if plan.batch_tokens is not None:
        batches = f"{plan.accumulated} batch{'es' * (plan.accumulated > 1)}"
        return f"{batches}, each of as many examples as fit into {plan.batch_tokens:,} tokens"
    gpus = f"{plan.num_gpus} GPU{'s' * (plan.num_gpus > 1)}"
    batches = f"{plan.accumulated} accumulated batch{'es' * (plan.accumulated > 1)}"
    return f"{plan.global_batch} examples: {gpus} x {batches} of {plan.per_device}"


def _of_this_machine(plans: list[StagePlan]) -> list[str]:
    """Whether the stages fit into the free memory of this machine's GPU."""
    if not torch.cuda.is_available():
        return ["This machine has no GPU, so it was not checked whether the memory is enough."]
    free, total = torch.cuda.mem_get_info()
    largest = max(plans, key=lambda plan: plan.bytes_needed)
    needed = largest.bytes_needed
    line = f"{torch.cuda.get_device_name()}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if needed <= free:
        return [f"{line}, which is enough."]
    busy = " Other processes use the rest; wait until they end." if needed <= total else ""
    checkpointing = "append `-- --activation_checkpointing true` to the command, which gives the same aligner, or "
    advice = "" if largest.activation_checkpointing else checkpointing
    return [
        f"{line}, but {needed / GIB:.1f} GiB are needed.{busy} To use less memory, {advice}lower "
        f"`{'per_device_train_batch_size' if largest.batch_tokens is None else 'batch_tokens'}`."
    ]
