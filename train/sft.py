"""Runs one training stage from a recipe: parse -> data -> model -> train -> save.

    python -m arcaligner.train.sft --config train/recipes/smollm2_135m/1_reconstruction.yaml
    python -m arcaligner.train.sft --config train/recipes/smollm2_135m/2_grounding.yaml --seed 2
    accelerate launch --num_processes 4 -m arcaligner.train.sft --config ...

Any key of the recipe can be given on the command line. A recipe's keys are those of `RecipeArguments` (stage, model,
data) and of TRL's `SFTConfig` (batches, optimizer, logs). A run resumes from the last checkpoint in its `output_dir`,
if its settings are those that it was begun with.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedConfig, set_seed

from ..base_model_arcaligner import resolve_model
from ..configuration_arcaligner import ArcAlignerConfig
from ..modeling_arcaligner import ArcAlignerForCausalLM, ContextProjector
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.export import save_stage
from .examples import ExampleBuilder, ExampleSelector
from .recipe import FROM_PROCESSOR, RecipeArguments, check_start, resolve_dtype, run_script
from .run import SCRIPT, claim_folder, last_checkpoint, last_checkpoints, mean_of_checkpoints
from .trainer import AlignerTrainer, AlignerTrainingConfig, ContextCollator

logger = logging.getLogger(__name__)

KINDS = (RecipeArguments, AlignerTrainingConfig)
# Enough to know which words are frequent.
RARITY_EXAMPLES = 50_000
# Minimum weight of a word, so that a slot of frequent words only has a weight as well.
MIN_RARITY = 0.02


def load_processor(recipe: RecipeArguments, chat_template_path: str | None) -> ArcAlignerProcessor:
    """The previous stage's processor or, for a base model, a new one; with the recipe's rates and chat template."""
    name = recipe.model_name_or_path
    config, _ = PreTrainedConfig.get_config_dict(resolve_model(name))
    if config.get("model_type") == ArcAlignerConfig.model_type:
        processor = ArcAlignerProcessor.from_pretrained(name)
        processor.answer_probe = None  # other weights have other states
        check_start(recipe, processor, ArcAlignerConfig.from_pretrained(name))
    else:
        words = bool(recipe.aligner.get("word_parts"))
        processor = ArcAlignerProcessor.from_base_model(name, context_words=words, **recipe.processor)
        check_start(recipe, processor, None)
    processor.tokens_per_slot = recipe.tokens_per_slot[0]
    processor.trained_tokens_per_slot = list(dict.fromkeys(recipe.tokens_per_slot))
    processor.passage_attention = recipe.aligner.get("passage_attention", processor.passage_attention)
    if chat_template_path is not None:
        processor.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
        processor.tokenizer.chat_template = processor.chat_template
    return processor


@torch.no_grad()
def set_word_statistics(projector: ContextProjector, table: torch.Tensor, rarity: torch.Tensor) -> None:
    """Initializes the words of a new aligner from the backbone's embedding `table` (vocab_size, hidden) and each word's
    `rarity` (vocab_size,)."""
    mean = table.float().mean(dim=0)
    projector.word_mean.copy_(mean)
    projector.slot_mean.copy_(mean)
    projector.slot_norm.copy_((table.float() - mean).norm(dim=1).mean())
    projector.word_weights.copy_(rarity)


def word_rarity(examples: Sequence[dict[str, Any]], vocab_size: int) -> np.ndarray:
    """Inverse document frequency of each token over the segments of `examples`, scaled to (0, 1]; (vocab_size,)."""
    counts, num_segments = np.zeros(vocab_size), 0
    for example in examples:
        for segment in example["segments"]:
            counts[np.unique(segment["word_ids"]).astype(np.int64)] += 1
            num_segments += 1
    rarity = np.log((num_segments + 1) / (counts + 1)) / math.log(num_segments + 1)
    return np.maximum(rarity, MIN_RARITY)


def make_trainer(
    recipe: RecipeArguments,
    args: AlignerTrainingConfig,
    processor: ArcAlignerProcessor,
    dtype: torch.dtype,
    train_dataset: Dataset,
    eval_dataset: Dataset | None,
) -> AlignerTrainer:
    """The model of a recipe and what trains it."""
    set_seed(args.seed)  # new LoRA, of encoder and backbone, starts from random weights
    processor.encoder.device = str(args.device)
    encoder_weights = processor.train_encoder(recipe.encoder_lora_r) if recipe.encoder_lora_r else []
    if encoder_weights:  # an encoder that is trained gets the backbone's attention kernel and compilation
        encoder = processor.encoder.model[0].model
        if recipe.attn_implementation is not None:
            encoder.set_attn_implementation(recipe.attn_implementation)
        if recipe.compile_layers:
            for layer in max((each for each in encoder.modules() if isinstance(each, torch.nn.ModuleList)), key=len):
                layer.compile(dynamic=True)  # for batches of any length
    processor.encoder.cast(dtype)
    model = ArcAlignerForCausalLM.from_pretrained(
        recipe.model_name_or_path,
        dtype=dtype,
        attn_implementation=recipe.attn_implementation,
        **{name: getattr(processor, name) for name in FROM_PROCESSOR},
        **recipe.aligner,
    )
    if model.config.training_stage is None and model.config.word_parts:  # a new aligner: a word counts by its rarity
        some = train_dataset.select(range(min(len(train_dataset), RARITY_EXAMPLES)))
        rarity = torch.from_numpy(word_rarity(some, model.config.text_config.vocab_size)).float()  # (vocab_size,)
        set_word_statistics(model.model.projector, model.get_input_embeddings().weight, rarity)
    if recipe.compile_layers:
        for layer in model.model.decoder_layers:
            layer.compile(dynamic=True)
    return AlignerTrainer(
        model,
        stage=recipe.stage,
        args=args,
        data_collator=ContextCollator(
            processor.context_token_id,
            processor.tokenizer.pad_token_id or 0,
            recipe.tokens_per_slot,
            context_words=bool(model.config.word_parts),
        ),
        encoder_weights=encoder_weights,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processor,
    )


def train(recipe: RecipeArguments, args: AlignerTrainingConfig, settings: str) -> None:
    """Data, model, training, saving, alone in the stage's folder; `settings`, of `run_settings`, are kept there."""
    with claim_folder(args.output_dir, settings, is_main=args.process_index == 0):
        checkpoint = last_checkpoint(args.output_dir)
        dtype = resolve_dtype(recipe.dtype, args.device, checkpoint)
        processor = load_processor(recipe, args.chat_template_path)
        if checkpoint is not None and recipe.encoder_lora_r:
            processor.load_trained_encoder(checkpoint)
        builder = ExampleBuilder(
            processor, recipe.max_segments, recipe.continues, recipe.tokens_per_slot, recipe.token_limit()
        )
        with args.main_process_first(desc="making the training examples"):
            selector = ExampleSelector(recipe, builder, args.seed, args.dataset_num_proc)
            examples = selector.training_examples(), selector.eval_examples()
        trainer = make_trainer(recipe, args, processor, dtype, *examples)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_state()
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # by all processes: each may have a part
        if trainer.is_world_process_zero():
            model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            if args.average_checkpoints:
                last = last_checkpoints(args.output_dir, args.average_checkpoints)
                state_dict |= mean_of_checkpoints(last, processor)
            save_stage(args.output_dir, model, processor, settings, state_dict)
            logger.info("saved to %s", args.output_dir)
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, train)
