"""ArcAligner on any decoder-only backbone (huggingface.co/papers/2601.05038), bottom-up, in the order of the data flow:

    context_embeds -> ContextProjector (Eq. 1) -> rows of the prompt's slots (Eq. 2) -> decoder layers, each with
    LoRA on slot rows (Eq. 3-4) and, where gated, refinement of the slots its gate opens (Eq. 5-9) -> logits

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text rows before the last slot), hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from .backbones_arcaligner import (
    check_backbone_config,
    find_decoder_layers,
    make_lm_head,
    postprocess_logits,
)
from .checkpoint_arcaligner import AlignerCheckpointMixin
from .configuration_arcaligner import ArcAlignerConfig
from .generation_arcaligner import SlotGenerationMixin
from .lora_arcaligner import ADAPTER_NAME, inject_slot_lora, slot_lora_layers
from .recording_arcaligner import recording_depths
from .refinement_arcaligner import SlotRows, find_slot_rows, read_on_host, take_rows
from .refinement_settings_arcaligner import check_refinement_settings, settings_of_forward
from .slot_layer_arcaligner import SlotGate, add_slots_to_layer

STAGES = ("reconstruction", "grounding", "gating")
# Below zero: the gates of a model that has not seen stage III are closed, so it computes what stage II taught it.
FRESH_GATE_BIAS = -0.5


@dataclass
class ArcAlignerModelOutputWithPast(BaseModelOutputWithPast):
    """
    Adds to `BaseModelOutputWithPast`:

    recursion_depth (`torch.LongTensor` of shape `(batch, num_layers, max_slots)`, *optional*):
        Refinement steps taken per layer and slot, -1 where there is no slot. Only when the input has slots.
    """

    recursion_depth: torch.LongTensor | None = None


@dataclass
class ArcAlignerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    Adds to `CausalLMOutputWithPast`:

    recursion_depth (`torch.LongTensor` of shape `(batch, num_layers, max_slots)`, *optional*):
        Refinement steps taken per layer and slot, -1 where there is no slot. Only when the input has slots.
    """

    recursion_depth: torch.LongTensor | None = None


class ContextProjector(nn.Module):
    """`W_psi` (Eq. 1): context embeddings (..., encoder_hidden_size) to slot embeddings (..., hidden)."""

    def __init__(self, encoder_hidden_size: int, hidden_size: int):
        super().__init__()
        self.up = nn.Linear(encoder_hidden_size, hidden_size)
        self.act = nn.GELU()
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, context_embeds: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.up(context_embeds.to(self.up.weight.dtype))))


class ArcAlignerPreTrainedModel(AlignerCheckpointMixin, PreTrainedModel):
    """Initialisation, freezing and checkpoints, common to `ArcAlignerModel` and `ArcAlignerForCausalLM`."""

    config_class = ArcAlignerConfig
    config: ArcAlignerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values"]
    # Missing aligner weights are fresh around a base model, and an error of our own in an aligner checkpoint.
    _keys_to_ignore_on_load_missing = [r"(^|\.)(projector|slot_gate|lora_A\.slot|lora_B\.slot)\."]
    # The aligner stays in fp32 under a bf16 backbone: at the paper's learning rates bf16 loses half of the updates.
    _keep_in_fp32_modules_strict = [r".*\.lora_A", r".*\.lora_B", r"projector", r".*\.slot_gate"]
    # What quantizers leave alone. Other spellings of the same: transformers wants the two lists disjoint.
    _keep_in_fp32_modules = [r".*lora_[A]", r".*lora_[B]", r"projecto[r]", r".*slot_gate"]

    def initialize_weights(self):
        """Aligner first: the backbone's own initialisation would treat its LoRA and gates like any other linear."""
        text_config = self.config.text_config
        for module in self.modules():
            if isinstance(module, ContextProjector):
                # Embeddings have norm 1; slots start about as large as the backbone's own initial embeddings.
                init.normal_(module.up.weight, std=1.0)
                init.normal_(module.out.weight, std=1.5 * text_config.initializer_range / text_config.hidden_size**0.5)
            if isinstance(module, SlotGate):
                init.normal_(module.up.weight, std=self.config.initializer_range)
                init.zeros_(module.out.weight)
            if isinstance(module, ContextProjector | SlotGate):
                init.zeros_(module.up.bias)
                init.constant_(module.out.bias, FRESH_GATE_BIAS if isinstance(module, SlotGate) else 0.0)
        for layer in slot_lora_layers(self):
            init.kaiming_uniform_(layer.lora_A[ADAPTER_NAME].weight, a=5**0.5)
            init.zeros_(layer.lora_B[ADAPTER_NAME].weight)
        for name, parameter in self.named_parameters():
            if self.is_aligner_key(name):
                parameter._is_hf_initialized = True
        super().initialize_weights()

    def aligner_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of projector, LoRA and gates: all that training changes and `save_pretrained` writes."""
        return ((name, p) for name, p in self.named_parameters() if self.is_aligner_key(name))

    def set_stage(self, stage: str) -> None:
        """Freezes and unfreezes what the paper's training stage says, and sets `gate_mode` and `training_stage` of the
        configuration.

        `"reconstruction"` and `"grounding"` train projector and LoRA with the gates off; `"gating"` trains the gates as
        well, adaptively. The backbone is frozen in all of them.

        Raises:
            `ValueError`: an unknown stage.
        """
        if stage not in STAGES:
            raise ValueError(f"Unknown stage {stage!r}; the stages are, in order: {', '.join(STAGES)}.")
        trains_gates = stage == "gating"
        for name, parameter in self.named_parameters():
            is_gate = ".slot_gate." in name
            parameter.requires_grad_(self.is_aligner_key(name) and (trains_gates or not is_gate))
        self.config.gate_mode = "adaptive" if trains_gates else "off"
        self.config.training_stage = stage

    def freeze_base_model(self) -> None:
        """Only the aligner requires gradients."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.is_aligner_key(name))


class ArcAlignerModel(ArcAlignerPreTrainedModel):
    """The backbone's decoder with slots: `input_ids` with context tokens and `context_embeds` to hidden states.

    Raises:
        `ValueError`: a backbone that cannot be refined, by name and with the reason.
    """

    def __init__(self, config: ArcAlignerConfig):
        super().__init__(config)
        check_backbone_config(config.text_config)
        self.backbone = AutoModel.from_config(config.text_config)
        config.text_config = self.backbone.config
        self.projector = ContextProjector(config.encoder_hidden_size, config.text_config.hidden_size)
        layers = find_decoder_layers(self.backbone)
        inject_slot_lora(self.backbone, layers, config)
        for layer_idx, layer in enumerate(layers):
            add_slots_to_layer(layer, layer_idx, config)
        self.layer_costs = [layer.slot_cost for layer in layers]
        self.post_init()
        self.freeze_base_model()

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.backbone.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        context_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        gate_mode: str | None = None,
        gate_threshold: float | None = None,
        max_refinement_steps: int | None = None,
        refinement_budget: float | None = None,
        is_generated: bool = False,
        **kwargs,
    ) -> ArcAlignerModelOutputWithPast:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, seq_len)`): Tokens; `config.context_token_id` marks a slot.
            context_embeds (`torch.FloatTensor` of shape `(batch, max_slots, encoder_hidden_size)`, *optional*):
                The embeddings `E` of the slots, in the order of the context tokens of a row, padded at the end.
            gate_mode, gate_threshold, max_refinement_steps (*optional*): For this forward, not the configuration's.
            refinement_budget (`float`, *optional*):
                The most operations that a row's refinement may take, as a share of the prefill up to its last slot;
                see `refinement_budget_arcaligner.py`. 0 is no refinement, infinity all that the gates want.
            is_generated (`bool`, defaults to `False`): `generate` says so of its tokens, which are no slots.

        Raises:
            `ValueError`: slots and embeddings that do not fit each other, slots after a non-empty cache, a prompt
                longer than the backbone's context, a setting of the gates or a budget that cannot be.
        """
        wanted = (gate_mode, gate_threshold, max_refinement_steps, refinement_budget)
        check_refinement_settings(*wanted)
        slot_mask = self._get_slot_mask(input_ids, context_embeds, is_generated)  # (batch, seq_len) or None
        depths = None
        if slot_mask is not None:
            if inputs_embeds is not None:
                raise ValueError(
                    "Got both `input_ids` and `inputs_embeds` with slots. Pass `input_ids`: the embeddings of text and "
                    "slots are looked up and placed here."
                )
            self._check_context_embeds(slot_mask, context_embeds)
            rows = self._find_slots(slot_mask, attention_mask, context_embeds, past_key_values)
            if torch.compiler.is_compiling():
                rows = rows._replace(slot_span=None)  # or code would be made for each place
            inputs_embeds = self._embed(input_ids, slot_mask, context_embeds)
            input_ids = None
            refinement = settings_of_forward(self.config, self.layer_costs, rows, self.training, *wanted)
            kwargs.update(rows._asdict(), refinement=refinement)
            depths = recording_depths.start()
        try:
            outputs = self.backbone(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        finally:
            recording_depths.stop()
        return ArcAlignerModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=None if depths is None else self._stack_depths(depths, rows.slot_positions),
        )

    def _get_slot_mask(self, input_ids, context_embeds, is_generated) -> torch.BoolTensor | None:
        """`M_r` (batch, seq_len): where `input_ids` holds context tokens. `None` for an input without slots."""
        if input_ids is None:
            if context_embeds is not None:
                raise ValueError(
                    "Got `context_embeds` without `input_ids`. Slots are found by their context tokens: pass "
                    f"`input_ids` with `context_token_id` {self.config.context_token_id} where the slots are."
                )
            return None
        if context_embeds is None and (is_generated or torch.compiler.is_compiling()):
            return None  # to look would make the host wait for the device
        slot_mask = input_ids == self.config.context_token_id
        if context_embeds is None:
            if slot_mask.any():
                raise ValueError(
                    f"Found {int(slot_mask.sum())} context tokens (id {self.config.context_token_id}) in `input_ids` "
                    "but no `context_embeds`. Pass the embeddings of the slots, as the processor returns them."
                )
            return None
        return slot_mask

    def _check_context_embeds(self, slot_mask, context_embeds) -> None:
        lora_layer = next(slot_lora_layers(self.backbone), None)  # none with `lora_r=0`
        adapters = [] if lora_layer is None else [*lora_layer.active_adapters, *lora_layer.merged_adapters]
        if lora_layer is not None and adapters != [ADAPTER_NAME]:
            raise ValueError(
                f"PEFT adapter {adapters} is active or merged, which switches the slots' own LoRA `{ADAPTER_NAME}` "
                "off. ArcAligner brings its LoRA: train it with `set_stage` and without a `peft_config`."
            )
        width = self.config.encoder_hidden_size
        if context_embeds.dim() != 3 or context_embeds.shape[0] != slot_mask.shape[0]:
            raise ValueError(
                f"`context_embeds` has shape {tuple(context_embeds.shape)}; expected ({slot_mask.shape[0]}, max_slots, "
                f"{width}), one row for each row of `input_ids`."
            )
        if context_embeds.shape[2] != width:
            raise ValueError(
                f"`context_embeds` is {context_embeds.shape[2]} wide but the projector takes `encoder_hidden_size` "
                f"{width}. Use the encoder the aligner was trained with: {self.config.encoder_name_or_path}."
            )

    @torch.compiler.disable  # it is the host's
    def _find_slots(self, slot_mask, attention_mask, context_embeds, past_key_values) -> SlotRows:
        is_slot, is_text, *found = read_on_host(
            slot_mask,
            _text_mask(slot_mask, attention_mask),
            torch.isfinite(context_embeds).all(dim=2),  # (batch, max_slots)
            context_embeds.ne(0).any(dim=2),  # (batch, max_slots)
        )
        self._check_slots(is_slot, *found, past_key_values)
        return find_slot_rows(is_slot, is_text, context_embeds.shape[1], slot_mask.device)

    def _check_slots(self, is_slot, is_finite, is_given, past_key_values) -> None:
        """`is_slot` (batch, seq_len); of the embeddings (batch, max_slots), which are finite and which are not zero."""
        counts, given = is_slot.sum(axis=1), is_given.shape[1]  # (batch,)
        most = counts.max(initial=0)
        if most > given or is_given[:, most:].any():
            raise ValueError(
                f"Found {counts.tolist()} context tokens in the rows of `input_ids` but `context_embeds` holds {given} "
                "embeddings a row. Each context token needs one embedding; rows with fewer are padded at the end."
            )
        is_broken = ~is_finite & (np.arange(given) < counts[:, None])
        if is_broken.any():
            row, slot = np.argwhere(is_broken)[0]
            raise ValueError(
                f"`context_embeds` holds NaN or infinite values in {is_broken.sum()} of {counts.sum()} slots, first in "
                f"slot {slot} of row {row}. Check the encoder's output."
            )
        if most and past_key_values is not None and past_key_values.get_seq_length() > 0:
            raise ValueError(
                f"Found context tokens after {past_key_values.get_seq_length()} cached tokens. Slots stand in the "
                "prompt, before any cache: refinement needs the deeper states of earlier tokens, which a cache does "
                "not hold. Start with an empty cache, or continue a cached slot prefix with plain text."
            )
        longest = getattr(self.config.text_config, "max_position_embeddings", None)
        if longest is not None and is_slot.shape[1] > longest:
            raise ValueError(
                f"The prompt has {is_slot.shape[1]} tokens but the backbone reads {longest}. Pass fewer "
                "passages, merge more sentences into a slot, or shorten the question."
            )

    def _embed(self, input_ids, slot_mask, context_embeds) -> torch.Tensor:
        """`H^(0,0)` (Eq. 2): projected embeddings on slots, frozen ones elsewhere, (batch, seq_len, hidden)."""
        inputs_embeds = self.get_input_embeddings()(input_ids.masked_fill(slot_mask, 0))
        if context_embeds.shape[1] == 0:
            return inputs_embeds
        # A NaN in the padding would not be read, but its gradient would.
        is_real = torch.arange(context_embeds.shape[1], device=slot_mask.device) < slot_mask.sum(dim=1, keepdim=True)
        slot_embeds = self.projector(context_embeds.masked_fill(~is_real[:, :, None], 0.0))  # Eq. 1
        which_slot = slot_mask.cumsum(dim=1) - 1  # (batch, seq_len)
        placed = take_rows(slot_embeds.to(inputs_embeds.dtype), which_slot)  # (batch, seq_len, hidden)
        return torch.where(slot_mask[:, :, None], placed, inputs_embeds)

    def _stack_depths(self, depths: dict[int, torch.Tensor], slot_positions: torch.Tensor) -> torch.LongTensor:
        """Depths of the layers that refined, 0 for the others -> (batch, num_layers, max_slots), -1 without a slot."""
        none = torch.zeros_like(slot_positions)
        num_layers = self.config.text_config.num_hidden_layers
        stacked = torch.stack([depths.get(i, none).to(none.device) for i in range(num_layers)], dim=1)
        return stacked.masked_fill(slot_positions[:, None, :] < 0, -1)


def _text_mask(slot_mask: torch.Tensor, attention_mask: torch.Tensor | dict | None) -> torch.Tensor:
    """Real text (batch, seq_len). Without a 2-D mask all rows count; the layers' own masks hide padding then."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return ~slot_mask & attention_mask[:, : slot_mask.shape[1]].bool()
    return ~slot_mask


class ArcAlignerForCausalLM(ArcAlignerPreTrainedModel, SlotGenerationMixin):
    """A frozen language model that reads passages as context slots.

    Example:

    ```python
    >>> processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
    >>> model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    >>> inputs = processor(text="Who wrote it?", documents=["It was written by Ada."], return_tensors="pt")
    >>> answer = model.generate(**inputs, max_new_tokens=16)
    ```
    """

    accepts_loss_kwargs = True
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ArcAlignerConfig):
        super().__init__(config)
        self.model = ArcAlignerModel(config)
        self.lm_head = make_lm_head(config.text_config)
        if config.tie_word_embeddings:
            embeddings = self.model.get_input_embeddings()
            name = next(name for name, module in self.named_modules() if module is embeddings)
            self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.post_init()
        self.freeze_base_model()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        context_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> ArcAlignerCausalLMOutputWithPast:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, seq_len)`): Tokens; `config.context_token_id` marks a slot.
            context_embeds (`torch.FloatTensor` of shape `(batch, max_slots, encoder_hidden_size)`, *optional*):
                One embedding a context token, in order, rows padded at the end.
            labels (`torch.LongTensor` of shape `(batch, seq_len)`, *optional*):
                Targets of the NLL (Eq. 10) of all three stages; -100 is ignored, and so is a context token.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0): Last positions to compute logits for, 0 for all.
            kwargs: `gate_mode`, `gate_threshold`, `max_refinement_steps` and `refinement_budget` of
                [`ArcAlignerModel`], and what the backbone takes.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            context_embeds=context_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        # As rows (batch * kept, hidden): else a frozen head is a batched product over a copied weight.
        logits = self.lm_head(hidden_states.flatten(0, 1)).unflatten(0, hidden_states.shape[:2])
        logits = postprocess_logits(logits, self.config.text_config)
        loss = None
        if labels is not None:
            labels = labels.masked_fill(labels == self.config.context_token_id, -100)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs
            )
        return ArcAlignerCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=outputs.recursion_depth,
        )


ArcAlignerForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["ArcAlignerForCausalLM", "ArcAlignerModel", "ArcAlignerPreTrainedModel"]
