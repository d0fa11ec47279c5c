"""Train one stage of a recipe: examples -> batches -> loss -> saved aligner.

    python -m arcaligner.train.sft --config train/recipes/smollm2_135m/1_reconstruction.yaml
    python -m arcaligner.train.sft --config train/recipes/smollm2_135m/2_grounding.yaml --seed 2
    accelerate launch --num_processes 4 -m arcaligner.train.sft --config ...

Any key of the recipe (`recipe.py`) can be set on the command line. A run resumes from the last checkpoint in its
`output_dir`, if its settings are unchanged.

The encoder runs inside the training step, so no embeddings need to be stored. The model computes the loss, at the
labeled positions only. Without Triton, TRL's fused head would also compute logits of the prompt, which on a CPU costs
more than all decoder layers of a small model.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, RandomSampler, Sampler
from transformers import PreTrainedConfig, TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTTrainer

from ..attention_arcaligner import passage_positions, place_passage_ids
from ..configuration_arcaligner import ArcAlignerConfig
from ..encoder_arcaligner import EncoderTokenizer
from ..loading_arcaligner import resolve_model
from ..modeling_arcaligner import ArcAlignerForCausalLM, ContextProjector
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import equal_spans
from ..share.export import save_stage
from .batches import (
    ExamplesWithCompression,
    TokenBatches,
    drawn_tokens_per_slot,
    encoder_inputs,
    example_lengths,
    padded,
    placed_words,
)
from .examples import ExampleBuilder, ExampleSelector, word_rarity
from .passages_first import PassagesFirstCollator, check_passages_first, run_passages_first
from .recipe import (
    FROM_PROCESSOR,
    AlignerTrainingConfig,
    RecipeArguments,
    check_start,
    resolve_dtype,
    run_script,
)
from .run import SCRIPT, claim_folder, last_checkpoint, last_checkpoints, mean_of_checkpoints, preparation

logger = logging.getLogger(__name__)

KINDS = (RecipeArguments, AlignerTrainingConfig)
# Enough examples to know which words are frequent.
RARITY_EXAMPLES = 50_000


# Batches


@dataclass
class ContextCollator:
    """
    Makes a padded batch of examples. The tokens per slot that are drawn for the batch decide how many slots they have.

    Args:
        context_token_id (`int`): The id that marks a slot.
        pad_token_id (`int`): Fills `input_ids`.
        encoder_tokenizer ([`EncoderTokenizer`]): Tokenizes the encoder's inputs here, in the data loader's workers.
        tokens_per_slot (`Sequence`): The numbers of tokens per slot to draw from. The ids of a batch's rows decide
            which is drawn, so that a resumed run draws the same ones.
        context_words (`bool`): Whether the batch contains the words of the slots.

    Returns a dictionary of

    - `input_ids`, `labels`: `torch.LongTensor` (batch, seq_len), labels -100 where nothing is learned;
    - `turn_ids`: `torch.LongTensor` (batch, seq_len), 0 before the turns, slots included, 1, 2, ... in the turns, -1 in
      padding; see `turn_mask`;
    - `max_turns`: `int`, the maximum number of turns of a row;
    - `encoder_inputs`: [`EncoderInputs`] of batch * max_slots slots, those of each row and its padding;
    - `context_word_ids`: `torch.LongTensor` (batch, max_slots, max_words), with `context_words`;
    - `context_passage_ids`: `torch.LongTensor` (batch, max_slots), the number of each slot's passage, -1 in padding;
    - `row_ids`: `list[str]`, for error messages.

    Except for `row_ids` nothing is nested, because moving a batch to a device walks through nested lists, number by
    number.
    """

    context_token_id: int
    pad_token_id: int
    encoder_tokenizer: EncoderTokenizer
    tokens_per_slot: Sequence[int | str] = ("segment",)
    context_words: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        row_ids = [row["row_id"] for row in rows]
        tokens_per_slot = drawn_tokens_per_slot(rows, self.tokens_per_slot)
        slots = [  # of each row, the number of the passage and the words of each slot
            [
                (segment["document"], segment["word_ids"][start:end])
                for segment in row["segments"]
                for start, end in equal_spans(len(segment["word_ids"]), tokens_per_slot)
            ]
            for row in rows
        ]
        ids, labels, turns = [], [], []
        for row, row_slots in zip(rows, slots, strict=True):
            before = row["head"] + [self.context_token_id] * len(row_slots)
            ids.append(before + [token for turn in row["turns"] for token in turn["input_ids"]])
            labels.append([-100] * len(before) + [token for turn in row["turns"] for token in turn["labels"]])
            turns.append([0] * len(before))
            for number, turn in enumerate(row["turns"], start=1):
                turns[-1] += [number] * len(turn["input_ids"])
        segments = [segment for row in rows for segment in row["segments"]]
        passages = padded([[passage for passage, _ in row_slots] for row_slots in slots], -1)  # (batch, max_slots)
        slot_indices = (passages.flatten() >= 0).nonzero()[:, 0]  # (num_slots,)
        batch = {
            "input_ids": padded(ids, self.pad_token_id),
            "labels": padded(labels, -100),
            "turn_ids": padded(turns, -1),
            "max_turns": max(len(row["turns"]) for row in rows),
            "encoder_inputs": encoder_inputs(
                self.encoder_tokenizer, segments, tokens_per_slot, slot_indices, passages.numel()
            ),
            "context_passage_ids": passages,
            "row_ids": row_ids,
        }
        if self.context_words:
            words = [slot_words for row_slots in slots for _, slot_words in row_slots]
            batch["context_word_ids"] = placed_words(words, slot_indices, passages.shape)
        return batch


def encode_slots(
    config: ArcAlignerConfig, processor: ArcAlignerProcessor, batch: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Encode the slots of a batch. Returns keyword arguments for a model with this `config`: `context_embeds` (batch or
    passage_rows, max_slots, encoder_hidden_size) and, if the model uses them, the words and passages of the slots.
    `context_embeds` have a gradient if the encoder is trained."""
    embeds = processor.encoder.encode_inputs(batch["encoder_inputs"])
    rows = batch["passage_ids" if "passage_ids" in batch else "context_passage_ids"]
    slots = {"context_embeds": embeds.view(len(rows), -1, embeds.shape[-1])}
    if config.word_parts:
        slots["context_word_ids"] = batch["context_word_ids"]
    if config.passage_attention == "separate" and "context_passage_ids" in batch:
        slots["context_passage_ids"] = batch["context_passage_ids"]
    return slots


def turn_mask(
    turn_ids: torch.LongTensor, passage_ids: torch.LongTensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.LongTensor]:
    """The attention mask and the positions of a batch: packed turns follow the slots, and do not attend to each other.

    Args:
        turn_ids (`torch.LongTensor` of shape `(batch, seq_len)`): From [`ContextCollator`].
        passage_ids (`torch.LongTensor` of shape `(batch, seq_len)`): The number of the passage that a slot's position
            is counted in, -1 on text; one number for all slots of a row if passages are joint.
        dtype (`torch.dtype`): The mask's dtype.

    Returns:
        The mask (batch, 1, seq_len, seq_len), 0 where a position attends to another and the lowest number elsewhere,
        and `position_ids` (batch, seq_len).
    """
    seq_len = turn_ids.shape[1]
    key, query = turn_ids[:, None, :], turn_ids[:, :, None]
    index = torch.arange(seq_len, device=turn_ids.device)
    is_visible = (index[None, :] <= index[:, None]) & ((key == 0) | (key == query))
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=turn_ids.device)
    mask = mask.masked_fill(~is_visible, torch.finfo(dtype).min)[:, None]
    in_prompt = passage_positions(passage_ids, turn_ids == 0)
    prompt_length = torch.where(turn_ids == 0, in_prompt + 1, 0).amax(dim=1, keepdim=True)  # (batch, 1)
    # The positions of each turn continue from the longest passage.
    begins = torch.nn.functional.pad(turn_ids[:, 1:] != turn_ids[:, :-1], (1, 0))
    start_of_turn = torch.where(begins, index, 0).cummax(dim=1).values  # (batch, seq_len)
    return mask, torch.where(turn_ids == 0, in_prompt, index - start_of_turn + prompt_length)


# The loss


class AlignerTrainer(SFTTrainer):
    """
    Trains projector, LoRA and, in the gating stage, the gates of an [`ArcAlignerForCausalLM`].

    Args:
        model ([`ArcAlignerForCausalLM`]): A loaded model; the stage decides here which of its parameters are trained.
        stage (`str`): `"reconstruction"`, `"grounding"` or `"gating"`.
        encoder_weights (`Sequence[nn.Parameter]`): The encoder's trained weights.
        attention_loss_weight (`float`), attention_loss_layers (`Sequence[int]`): Weight and layers of the attention
            loss, for batches of a [`PassagesFirstCollator`]; see `train/passages_first.py`.
        **kwargs: Passed to [`~trl.SFTTrainer`]: the `args`, a [`ContextCollator`], data, the processor.

    Added to the logs:

    - `num_tokens`: tokens seen by all processes so far, without padding;
    - `attention_loss`: its mean, if it has a weight;
    - in the gating stage `refinement_steps` (mean number of refinement steps of a slot at a layer) and `open_gates`
      (share of slots and layers with at least one step);
    - at evaluations `eval_perplexity` of the targets and, if it is switched on, `eval_slot_gap`: how much the loss
      grows with the slots of other rows. Slots also convey the style of answers; the gap measures their content.
    """

    _tag_names = ["trl", "sft", "arcaligner"]

    def __init__(
        self,
        model: ArcAlignerForCausalLM,
        *,
        stage: str,
        encoder_weights: Sequence[torch.nn.Parameter] = (),
        attention_loss_weight: float = 0.0,
        attention_loss_layers: Sequence[int] = (),
        **kwargs: Any,
    ):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                "The model has no weights in this process, because `fsdp_cpu_ram_efficient_loading` is true in the "
                "configuration of accelerate, so that only the first process loads weights. Set this key to false, as "
                "in train/accelerate/fsdp2.yaml."
            )
        if isinstance(kwargs.get("data_collator"), PassagesFirstCollator):
            check_passages_first(model, kwargs.get("args"), attention_loss_layers)
        model.set_stage(stage)
        model.set_answerability_layers(None)  # the head was fitted to states of different weights
        # As parameters of the model they are optimized, clipped and averaged over processes like the others. They are
        # saved with the processor.
        model.encoder_weights = torch.nn.ParameterList(encoder_weights)
        super().__init__(model, **kwargs)
        model.register_load_state_dict_post_hook(_expect_aligner_only)
        self.deadline = None if self.args.max_seconds is None else Deadline(self.args.max_seconds)
        if self.deadline is not None:  # before `StepCallback`, which gathers counts if a checkpoint is saved
            self.add_callback(self.deadline)
        self.add_callback(StepCallback(self))
        # A loss that is not finite ends the run; the filter would synchronize twice a step.
        self.args.logging_nan_inf_filter = False
        if self.is_deepspeed_enabled:
            raise ValueError("DeepSpeed is not supported. Use `--accelerate fsdp2`, which shards the model as well.")
        if encoder_weights and self.is_fsdp_enabled:
            raise ValueError(
                "`encoder_lora_r` is set, so the encoder is trained, but FSDP would shard the weights of its LoRA. "
                "Leave `encoder_lora_r` out, or train on one device or with `--accelerate ddp`."
            )
        # A sharded head is gathered during its own call only.
        self.skip_logits = not self.is_fsdp_enabled
        # Of this process, on its device: tokens, refinement steps, open gates, all gates. They are copied to the host
        # only when something is logged or saved, because each copy waits for the device.
        self._counts = torch.zeros(4, dtype=torch.long, device=self.args.device)
        self._gates = [0, 0, 0]  # since the last log, of all processes: steps, open gates, all gates
        self._eval_losses: list[torch.Tensor] = []  # of each batch: summed over targets, number of targets
        self._losses_of_step: list[tuple[torch.Tensor, list[str]]] = []  # with the ids of their rows
        self.attention_loss_weight = attention_loss_weight
        self.attention_loss_layers = tuple(attention_loss_layers) if attention_loss_weight else ()
        self._attention_losses: list[torch.Tensor] = []  # since the last log

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: TRL's names no base model, and `save_stage` writes one."""

    def get_train_dataloader(self) -> DataLoader:
        """As in the parent class, but in an order that only the seed and the epoch decide: see [`EpochOrder`], or
        [`TokenBatches`] with `batch_tokens`."""
        args, dataset = self.args, self.train_dataset
        seed = args.seed if args.data_seed is None else args.data_seed
        loading = {
            "collate_fn": self.data_collator,  # uses no random numbers, so its workers need no seed
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if args.batch_tokens is not None:
            compressions, num_batches = (
                self.data_collator.tokens_per_slot,
                args.max_steps * args.gradient_accumulation_steps,
            )
            batches = TokenBatches(
                example_lengths(dataset, compressions), compressions, args.batch_tokens, num_batches, seed
            )
            return self.accelerator.prepare(
                DataLoader(ExamplesWithCompression(dataset), batch_sampler=batches, **loading)
            )
        # The lengths as a list, because reading a single value of a column takes up to 1 ms.
        if args.train_sampling_strategy == "group_by_length":
            sampler = LengthGroupedSampler(
                args.train_batch_size * args.gradient_accumulation_steps,
                lengths=list(dataset[args.length_column_name]),
            )
        elif args.train_sampling_strategy == "random":
            sampler = RandomSampler(dataset)
        else:  # draws nothing
            return super().get_train_dataloader()
        batches = DataLoader(
            dataset,
            batch_size=args.train_batch_size,
            sampler=EpochOrder(sampler, seed, state=lambda: self.state),
            drop_last=args.dataloader_drop_last,
            **loading,
        )
        return self.accelerator.prepare(batches)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """As in the parent class, with separate learning rates for gates and encoder if they are set."""
        # Split the groups of `Trainer` rather than build new ones, so that its choice of weight decay remains.
        optimizer = super().create_optimizer(model)
        rates = {".slot_gate.": self.args.gate_learning_rate, "encoder_weights.": self.args.encoder_learning_rate}
        for part, rate in rates.items():
            members = {parameter for name, parameter in self.model.named_parameters() if part in name}
            for group in list(optimizer.param_groups) if rate is not None else ():
                chosen = [parameter for parameter in group["params"] if parameter in members]
                if chosen:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in members]
                    optimizer.add_param_group(group | {"params": chosen, "lr": rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """As in the parent class; with `max_seconds` the learning rate follows the time, where that is further than the
        steps."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.deadline is not None:
            if not isinstance(scheduler, LambdaLR):
                raise ValueError(
                    f"`lr_scheduler_type` is {self.args.lr_scheduler_type.value!r}, which depends on more than the "
                    "step, so it cannot follow `max_seconds`. Choose another one, such as 'linear', or leave "
                    "`max_seconds` out."
                )
            scheduler.lr_lambdas = [
                partial(self.deadline.factor, factor, num_training_steps) for factor in scheduler.lr_lambdas
            ]
        return scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The NLL of a batch's targets (Eq. 10)."""
        if "passage_ids" in inputs:
            loss, outputs = self._passages_first_loss(inputs, num_items_in_batch)
        else:
            loss, outputs = self._joint_loss(model, inputs, num_items_in_batch)
        self._losses_of_step.append((loss.detach(), inputs["row_ids"]))
        if not self.model.training:  # in training they are checked once a step, with the gradients
            self.check_finite()
        self._record_metrics(inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    def _encode(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The slots of a batch, on its device."""
        has_lora, dtype, device = len(self.model.encoder_weights) > 0, self.model.dtype, self.args.device
        autocast = torch.autocast(device.type, dtype, enabled=has_lora and dtype != torch.float32)  # LoRA is float32
        with torch.set_grad_enabled(self.model.training and has_lora), autocast:
            slots = encode_slots(self.model.config, self.processing_class, inputs)
        return {name: tensor.to(device) for name, tensor in slots.items()}

    def _passages_first_loss(self, inputs: dict[str, Any], num_items_in_batch=None):
        """The loss and the outputs of a batch of a [`PassagesFirstCollator`]."""
        layers = self.attention_loss_layers if self.model.training else ()
        try:
            slots = self._encode(inputs)
            outputs, attention_loss = run_passages_first(
                self.model, inputs, slots, num_items_in_batch, layers, with_logits=not self.skip_logits
            )
        except ValueError as error:
            error.add_note(
                f"The error occurred at step {self.state.global_step}, in the batch of the rows with the ids "
                f"{inputs['row_ids']}."
            )
            raise
        loss = outputs.loss
        if attention_loss is not None:
            loss = loss + self.attention_loss_weight * attention_loss
            self._attention_losses.append(attention_loss.detach())
        return loss, outputs

    def _joint_loss(self, model, inputs: dict[str, Any], num_items_in_batch=None):
        """The loss and the outputs of a batch of a [`ContextCollator`]."""
        row_ids, config = inputs["row_ids"], self.model.config
        if inputs["max_turns"] > 1:
            numbers = inputs["context_passage_ids"] if config.passage_attention == "separate" else None
            passage_ids = place_passage_ids(inputs["input_ids"] == config.context_token_id, numbers)
            mask, position_ids = turn_mask(inputs["turn_ids"], passage_ids, self.model.dtype)
        else:  # a plain mask works with all attention kernels and sliding windows
            mask, position_ids = (inputs["turn_ids"] >= 0).long(), None
        try:
            slots = self._encode(inputs)
            outputs = model(
                input_ids=inputs["input_ids"],
                attention_mask=mask,
                position_ids=position_ids,
                labels=inputs["labels"],
                use_cache=False,
                skip_logits=self.skip_logits,
                num_items_in_batch=num_items_in_batch,
                **slots,
            )
        except ValueError as error:
            error.add_note(
                f"The error occurred at step {self.state.global_step}, in the batch of the rows with the ids {row_ids}."
            )
            raise
        # The loss is divided by the targets of all processes, and gradients are averaged over processes again.
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            outputs.loss = outputs.loss * self.accelerator.num_processes
        return outputs.loss, outputs

    def check_gradients(self) -> None:
        """Check gradients before the optimizer's step, so that no checkpoint contains NaN weights."""
        norm = None
        if not self.args.fp16:  # the loss scaling of fp16 skips such steps
            gradients = [parameter.grad for parameter in self.model_wrapped.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # of sharded weights
        self.check_finite(norm)

    def check_finite(self, norm: torch.Tensor | None = None) -> None:
        """Stop all processes if a loss since the last check, or the gradients' `norm`, is not finite in one of them. If
        only that one stopped, the others would wait for it. The host waits for the device once."""
        losses, self._losses_of_step = self._losses_of_step, []
        values = [value.float() for value, _ in losses] + ([] if norm is None else [norm.to(self.args.device).float()])
        if self.accelerator.gather(torch.stack(values).isfinite().all().int()[None]).all():
            return
        step, rows = self.state.global_step, [row for _, ids in losses for row in ids]
        # The loss first: if it is not finite in one process, the gradients of all processes are not.
        for name, checked in (("loss", losses), ("gradient norm", [] if norm is None else [(norm, rows)])):
            values = [(value.item(), ids) for value, ids in checked]
            infinite = [(value, ids) for value, ids in values if not math.isfinite(value)]
            failed = [f"{value} at step {step} for the rows with the ids {ids}" for value, ids in infinite]
            if failed := gather_object(failed):
                raise ValueError(
                    f"The {name} is {' and '.join(failed)}; expected a finite number. Lower `learning_rate`, or leave "
                    f"these rows out of the data. Earlier checkpoints are in {self.args.output_dir}."
                )

    @torch.no_grad()
    def _record_metrics(self, inputs: dict[str, Any], outputs) -> None:
        if not self.model.training:
            num_targets = (inputs["labels"][:, 1:] != -100).sum()
            self._eval_losses.append(torch.stack([outputs.loss.detach() * num_targets, num_targets]))
            return
        has_gates = self.model.config.gate_mode != "off" and outputs.recursion_depth is not None
        # (batch, num_layers, max_slots), -1 where there is no slot
        depths = outputs.recursion_depth if has_gates else inputs["turn_ids"].new_empty(0)
        num_tokens = (inputs["turn_ids"] >= 0).sum()
        if "passage_mask" in inputs:  # slots and turns are in different rows
            num_tokens = num_tokens + inputs["passage_mask"].sum()
        counts = [num_tokens, depths.clamp(min=0).sum(), (depths > 0).sum(), (depths >= 0).sum()]
        self._counts += torch.stack(counts)

    def gather_counts(self) -> None:
        """Copy the counts of all processes to the host."""
        num_tokens, *gates = self.accelerator.gather(self._counts[None]).sum(dim=0).tolist()
        self.state.num_input_tokens_seen += num_tokens  # part of checkpoints
        self._gates = [count + new for count, new in zip(self._gates, gates, strict=True)]
        self._counts.zero_()

    def _mean_eval_loss(self) -> float:
        """The loss of all targets of all processes since the last call."""
        pairs = self.accelerator.gather(torch.stack(self._eval_losses)).cpu().double()  # some devices lack float64
        self._eval_losses = []
        return _mean(pairs.sum(dim=0))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and "loss" in logs:
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self._attention_losses:
                logs["attention_loss"] = float(torch.stack(self._attention_losses).mean())
                self._attention_losses = []
            steps, opened, num_gates = self._gates
            if num_gates:
                logs |= {"refinement_steps": steps / num_gates, "open_gates": opened / num_gates}
                self._gates = [0, 0, 0]
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Held-out loss, perplexity over all targets and, with `eval_slot_gap`, the gap."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self._eval_losses = []
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        loss = self._mean_eval_loss()
        added = {"perplexity": math.exp(min(loss, 700.0))}
        if self.args.eval_slot_gap:
            collator = self.data_collator
            self.data_collator = lambda rows: collator(swapped_slots(rows))
            try:
                batches = self.get_eval_dataloader(dataset)
                self.evaluation_loop(batches, "Evaluation with the slots of other examples", prediction_loss_only=True)
            finally:
                self.data_collator = collator
            added["slot_gap"] = self._mean_eval_loss() - loss
        added = {f"{metric_key_prefix}_{name}": value for name, value in added.items()}
        self.log(added)
        return metrics | added

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss and, for `compute_metrics` or `predict`, logits (batch, seq_len, vocab_size) and labels (batch,
        seq_len); with a [`PassagesFirstCollator`] those of the turns only. Otherwise the frozen head computes no
        logits."""
        inputs, skip_logits = send_to_device(inputs, self.args.device), self.skip_logits
        self.skip_logits = skip_logits and prediction_loss_only
        try:
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        finally:
            self.skip_logits = skip_logits
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), outputs.logits.detach(), inputs["labels"]


def swapped_slots(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each row of a batch the passages of the next row with different ones. How much the loss grows measures the
    content of the slots."""
    segments = [row["segments"] for row in rows]
    swapped = []
    for number, row in enumerate(rows):
        others = (other for other in [*segments[number + 1 :], *segments] if other != segments[number])
        swapped.append(row | {"segments": next(others, segments[number])})
    return swapped


class StepCallback(TrainerCallback):
    """Make a trainer check its losses and gradients before each optimizer step, and gather counts before it logs or
    saves."""

    def __init__(self, trainer: AlignerTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.trainer.check_gradients()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        # The best checkpoint is saved after an evaluation.
        if control.should_log or control.should_save or control.should_evaluate:
            self.trainer.gather_counts()

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.trainer.gather_counts()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.trainer.gather_counts()


class Deadline(TrainerCallback, ExportableState):
    """Ends a training `max_seconds` after its first step. Checkpoints store the time that has passed."""

    def __init__(self, max_seconds: float):
        self.max_seconds = max_seconds
        self._seconds, self._began = 0.0, None  # of the runs before this one, and when this one began

    @property
    def seconds(self) -> float:
        """The time that has passed."""
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def factor(self, factor_of_step: Callable[[int], float], num_steps: int, step: int) -> float:
        """The factor of the learning rate: that of `step`, or of a later step, if the time is further."""
        share = min(1.0, self.seconds / self.max_seconds)
        return factor_of_step(max(step, int(share * num_steps)))

    @classmethod
    def seconds_of(cls, state: TrainerState) -> float:
        """The time that had passed when the `state` of a checkpoint was saved."""
        saved = state.stateful_callbacks.get(cls.__name__)
        return 0.0 if saved is None else saved["attributes"]["seconds"]

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._seconds = self.seconds_of(state)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.seconds >= self.max_seconds:  # as after the last step of `max_steps`
            control.should_training_stop = True
            control.should_save |= args.save_strategy == "steps"
            control.should_evaluate |= args.eval_strategy == "steps" and args.eval_delay <= state.global_step

    def state(self) -> dict[str, Any]:
        return {"args": {"max_seconds": self.max_seconds}, "attributes": {"seconds": self.seconds}}


def _expect_aligner_only(model: ArcAlignerForCausalLM, keys) -> None:
    """Hook: a checkpoint contains the aligner only, so missing weights of the base model are no error."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if model.is_aligner_key(key)]


class EpochOrder(Sampler[int]):
    """
    A sampler whose order depends only on a seed and the number of the epoch.

    transformers' own samplers use the global generator, which dropout advances differently in each process. From the
    second epoch on, processes would use different orders, see some rows twice and others never, and a run resumed in
    the second epoch would use a different order than before.

    Args:
        sampler (`Sampler`): With a `generator` attribute that it draws from, like those of torch and transformers.
        seed (`int`): The run's seed.
        state (`Callable`): Returns the trainer's state. At its last step the sampler is empty; otherwise `Trainer`,
            resumed there, would take one more step.
    """

    def __init__(self, sampler: Sampler[int], seed: int, state: Callable[[], TrainerState]):
        self.sampler = sampler
        self.seed = seed
        self.state = state

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        state = self.state()
        if state.global_step >= state.max_steps > 0:
            return iter(())
        self.sampler.generator = torch.Generator().manual_seed(self.seed + int(state.epoch or 0))
        return iter(self.sampler)


def _mean(pair: torch.Tensor) -> float:
    total, count = pair.tolist()
    return total / max(1.0, count)


# A stage


def load_processor(recipe: RecipeArguments, chat_template_path: str | None) -> ArcAlignerProcessor:
    """The previous stage's processor or, for a base model, a new one, with the recipe's tokens per slot and chat
    template."""
    name = recipe.model_name_or_path
    config, _ = PreTrainedConfig.get_config_dict(resolve_model(name))
    if config.get("model_type") == ArcAlignerConfig.model_type:
        processor = ArcAlignerProcessor.from_pretrained(name)
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


def make_trainer(
    recipe: RecipeArguments,
    args: AlignerTrainingConfig,
    processor: ArcAlignerProcessor,
    dtype: torch.dtype,
    train_dataset: Dataset,
    eval_dataset: Dataset | None,
) -> AlignerTrainer:
    """The trainer of a recipe, with its model."""
    set_seed(args.seed)  # new LoRA, of encoder and backbone, starts from random weights
    processor.encoder.device = str(args.device)
    encoder_weights = processor.train_encoder(recipe.encoder_lora_r) if recipe.encoder_lora_r else []
    if encoder_weights:  # a trained encoder uses the backbone's attention kernel and compilation
        encoder = processor.encoder.model[0].model
        if recipe.attn_implementation is not None:
            encoder.set_attn_implementation(recipe.attn_implementation)
        if recipe.compile_layers:
            lists = (module for module in encoder.modules() if isinstance(module, torch.nn.ModuleList))
            for layer in max(lists, key=len):
                layer.compile(dynamic=True)  # for batches of any length
    processor.encoder.cast(dtype)
    model = ArcAlignerForCausalLM.from_pretrained(
        recipe.model_name_or_path,
        dtype=dtype,
        attn_implementation=recipe.attn_implementation,
        **{name: getattr(processor, name) for name in FROM_PROCESSOR},
        **recipe.aligner,
    )
    # A new aligner: initialize the weight of each word by its rarity.
    if model.config.training_stage is None and model.config.word_parts:
        sample = train_dataset.select(range(min(len(train_dataset), RARITY_EXAMPLES)))
        rarity = torch.from_numpy(word_rarity(sample, model.config.text_config.vocab_size)).float()  # (vocab_size,)
        set_word_statistics(model.model.projector, model.get_input_embeddings().weight, rarity)
    if recipe.compile_layers:
        for layer in model.model.decoder_layers:
            layer.compile(dynamic=True)
    tokens = (processor.encoder.text_tokenizer, recipe.tokens_per_slot, bool(model.config.word_parts))
    if recipe.passages_first:
        collator = PassagesFirstCollator(processor.context_token_id, processor.tokenizer, *tokens)
    else:
        collator = ContextCollator(processor.context_token_id, processor.tokenizer.pad_token_id or 0, *tokens)
    return AlignerTrainer(
        model,
        stage=recipe.stage,
        args=args,
        data_collator=collator,
        attention_loss_weight=recipe.attention_loss_weight,
        attention_loss_layers=recipe.attention_loss_layers,
        encoder_weights=encoder_weights,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processor,
    )


def train(recipe: RecipeArguments, args: AlignerTrainingConfig, settings: str) -> None:
    """Load data and model, train and save. The stage's folder is locked meanwhile, and the `settings` of `run_settings`
    are saved in it."""
    with claim_folder(args.output_dir, settings, is_main=args.process_index == 0):
        checkpoint = last_checkpoint(args.output_dir)
        if checkpoint is not None and args.max_seconds is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            if Deadline.seconds_of(state) >= args.max_seconds:  # only the saving of the stage is left
                args.max_steps = state.global_step
        with preparation():
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
        # Called by all processes: each may have a shard.
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.is_world_process_zero():
            model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            if args.average_checkpoints:
                last = last_checkpoints(args.output_dir, args.average_checkpoints)
                state_dict |= mean_of_checkpoints(last, processor)
            save_stage(args.output_dir, model, processor, settings, state_dict)
            logger.info("saved the aligner in %s", args.output_dir)
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, train)
