"""ArcAligner on any decoder-only backbone (huggingface.co/papers/2601.05038), bottom-up, in the order of the data flow:

    context_embeds -> ContextProjector (Eq. 1) -> rows of the prompt's slots (Eq. 2) -> decoder layers, each with
    LoRA on slot rows (Eq. 3-4) and, where gated, refinement of the slots its gate opens (Eq. 5-9) -> logits

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text rows before the last slot), hidden.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .base_model_arcaligner import (
    CACHE,
    cache_of,
    check_backbone_config,
    find_decoder_layers,
    make_lm_head,
    one_cache,
)
from .checkpoint_arcaligner import AlignerMixin
from .configuration_arcaligner import (
    LARGEST_VALUE,
    ArcAlignerConfig,
    check_context_embeds,
    check_gates,
    check_ids,
    check_length,
    check_slots,
    check_word_ids,
)
from .generation_arcaligner import SlotGenerationMixin, check_slots_after_cache
from .layers_arcaligner import (
    ADAPTER_NAME,
    RecordedDepths,
    SlotGate,
    Slots,
    add_slots_to_layer,
    check_adapters,
    inject_slot_lora,
    slot_lora_layers,
)
from .slot_rows_arcaligner import (
    SharedStepInputs,
    SlotRows,
    check_can_separate,
    check_passage_ids,
    find_slot_rows,
    passage_positions,
    place_passage_ids,
    resolve_settings,
    separate_passages,
    take_rows,
    to_numpy_in_one_sync,
)

# Below zero: the gates of a model that has not seen stage III are closed, so it computes what stage II taught it.
FRESH_GATE_BIAS = -0.5


@dataclass
class ArcAlignerModelOutputWithPast(BaseModelOutputWithPast):
    """Adds to `BaseModelOutputWithPast`:

    recursion_depth (`torch.LongTensor` of shape `(batch, num_layers, max_slots)`, *optional*):
        Refinement steps taken per layer and slot, -1 where there is no slot. Only when the input has slots.
    """

    recursion_depth: torch.LongTensor | None = None


@dataclass
class ArcAlignerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Adds to `CausalLMOutputWithPast` the `recursion_depth` of [`ArcAlignerModelOutputWithPast`]."""

    recursion_depth: torch.LongTensor | None = None


class ContextProjector(nn.Module):
    """`W_psi` (Eq. 1): context embeddings (..., encoder_hidden_size) to slot embeddings (..., hidden).

    With `word_parts`, beyond the paper, the slot's words are added: their embeddings in the backbone's frozen table,
    less the table's mean, are averaged within each part of the slot and passed through the part's own map, which starts
    as the identity. How much a word counts starts as its rarity and is learned. The sum is brought to the norm of a
    word's embedding: a frozen layer repeats a slot that is much larger, and ignores one that is much smaller.
    """

    def __init__(self, encoder_hidden_size: int, hidden_size: int, word_parts: int = 0, vocab_size: int = 0):
        super().__init__()
        self.word_parts = word_parts
        self.up = nn.Linear(encoder_hidden_size, hidden_size)
        self.act = nn.GELU()
        self.out = nn.Linear(hidden_size, hidden_size)
        if word_parts:
            self.part_maps = nn.Parameter(torch.empty(word_parts, hidden_size, hidden_size))
            self.slot_norm = nn.Parameter(torch.empty(()))  # Euclidean norm of a slot, less the mean embedding
            self.slot_mean = nn.Parameter(torch.empty(hidden_size))
            self.register_buffer("word_mean", torch.empty(hidden_size))
            self.word_weights = nn.Parameter(torch.empty(vocab_size))

    def forward(self, context_embeds: torch.Tensor, part_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """`context_embeds` (..., encoder_hidden_size) and `part_embeds` (..., word_parts, hidden), of `average_words`,
        to slots (..., hidden)."""
        slots = self.out(self.act(self.up(context_embeds.to(self.up.weight.dtype))))
        if part_embeds is None:
            return slots
        slots = slots + torch.einsum("...pd,ped->...e", part_embeds.to(slots.dtype), self.part_maps)
        return nn.functional.normalize(slots, dim=-1) * self.slot_norm + self.slot_mean

    def average_words(self, word_ids: torch.LongTensor, table: torch.Tensor) -> torch.Tensor:
        """The words of each part of a slot, averaged by their weights over the whole slot.

        Args:
            word_ids (`torch.LongTensor` of shape `(..., max_words)`): Ids of a slot's tokens in order, -1 after them.
            table (`torch.Tensor` of shape `(vocab_size, hidden)`): The backbone's embeddings.

        Returns:
            `torch.Tensor` of shape `(..., word_parts, hidden)`; their sum over the parts is the slot's weighted mean.
        """
        is_word = word_ids >= 0
        ids = word_ids.clamp(min=0)  # padding reads some word, with the weight 0
        weights = self.word_weights[ids].float().abs() * is_word  # (..., max_words)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        num_words = is_word.sum(dim=-1, keepdim=True).clamp(min=1)
        part = torch.arange(word_ids.shape[-1], device=ids.device) * self.word_parts // num_words  # (..., max_words)
        in_part = part[..., None, :] == torch.arange(self.word_parts, device=ids.device)[:, None]
        # Less what all embeddings have in common, which a mean of words would mostly be.
        words = nn.functional.embedding(ids, table).float() - self.word_mean.float()  # (..., max_words, hidden)
        return (weights[..., None, :] * in_part) @ words


class ArcAlignerPreTrainedModel(AlignerMixin, PreTrainedModel):
    """Common to `ArcAlignerModel` and `ArcAlignerForCausalLM`: initialization and, of [`AlignerMixin`], checkpoints."""

    config_class = ArcAlignerConfig
    config: ArcAlignerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "cache"]

    def initialize_weights(self):
        """Initializes the aligner first: the backbone would initialize LoRA and gates like any other linear."""
        text_config = self.config.text_config
        for module in self.modules():
            if isinstance(module, ContextProjector):
                # Embeddings have norm 1; slots start about as large as the backbone's own initial embeddings.
                init.normal_(module.up.weight, std=1.0)
                init.normal_(module.out.weight, std=1.5 * text_config.initializer_range / text_config.hidden_size**0.5)
                if module.word_parts:  # slots start as the mean of their words, unweighted until training begins
                    init.normal_(module.out.weight, std=text_config.initializer_range / text_config.hidden_size**0.5)
                    init.copy_(module.part_maps, torch.eye(text_config.hidden_size).expand_as(module.part_maps))
                    init.ones_(module.slot_norm)
                    init.zeros_(module.slot_mean)
                    init.zeros_(module.word_mean)
                    init.ones_(module.word_weights)
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
        self.projector = ContextProjector(
            config.encoder_hidden_size, config.text_config.hidden_size, config.word_parts, config.text_config.vocab_size
        )
        layers = find_decoder_layers(self.backbone)
        inject_slot_lora(self.backbone, layers, config)
        for layer_idx, layer in enumerate(layers):
            add_slots_to_layer(layer, layer_idx, config)
        self.layer_costs = [layer.slot_cost for layer in layers]
        self.decoder_layers = tuple(layers)  # not a list of modules, which would name their weights twice
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
        context_word_ids: torch.LongTensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        gate_mode: str | None = None,
        gate_threshold: float | None = None,
        max_refinement_steps: int | None = None,
        refinement_budget: float | None = None,
        is_generated: bool = False,
        cache: Cache | None = None,
        **kwargs,
    ) -> ArcAlignerModelOutputWithPast:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, seq_len)`): Tokens; `config.context_token_id` marks a slot.
            context_embeds (`torch.FloatTensor` of shape `(batch, max_slots, encoder_hidden_size)`, *optional*):
                The embeddings `E` of the slots, in the order of the context tokens of a row, padded at the end.
            context_word_ids (`torch.LongTensor` of shape `(batch, max_slots, max_words)`, *optional*):
                With `config.word_parts`: the tokens that a slot stands for, in order, padded with -1.
            context_passage_ids (`torch.LongTensor` of shape `(batch, max_slots)`, *optional*):
                With `config.passage_attention` `"separate"`: the number of each slot's passage, never falling along a
                row. Without it, all slots of a row are of one passage.
            cache (`Cache`, *optional*): `past_key_values` by the name that it has in transformers since 5.24.
            gate_mode, gate_threshold, max_refinement_steps (*optional*): Override the configuration for this forward.
            refinement_budget (`float`, *optional*):
                Maximum number of operations of a row's refinement, as a share of those of the prefill up to its last
                slot; see [`RefinementBudget`]. 0 is no refinement, infinity is no limit.
            is_generated (`bool`, defaults to `False`): Set by `generate` for new tokens, which are never slots.

        Raises:
            `ValueError`: slots and embeddings that do not fit each other, slots after a non-empty cache, a prompt
                longer than the backbone's context, an invalid setting of the gates or budget.
        """
        cache = one_cache(past_key_values, cache)
        wanted = (gate_mode, gate_threshold, max_refinement_steps, refinement_budget)
        check_gates(*wanted)
        slot_mask = self._get_slot_mask(input_ids, context_embeds, is_generated)  # (batch, seq_len)
        has_slots, given = slot_mask is not None, inputs_embeds if input_ids is None else input_ids
        if not has_slots and given is not None and self.training and torch.is_grad_enabled():
            # Zero gradients instead of none: other processes wait for those of each trained parameter.
            slot_mask, context_embeds, context_word_ids = self._no_slots(given)
        if slot_mask is not None:
            self._check_slot_inputs(slot_mask, input_ids, inputs_embeds, context_embeds, context_word_ids)
            rows = self._find_slots(slot_mask, attention_mask, context_embeds)
            if self.config.passage_attention == "separate" and context_passage_ids is not None:
                attention_mask, position_ids = self._keep_passages_apart(
                    slot_mask, context_embeds, context_passage_ids, attention_mask, position_ids, cache
                )
            check_length(slot_mask.shape[1], "The prompt", self.config.text_config, position_ids)
            if torch.compiler.is_compiling():
                rows = rows.for_any_length()
            inputs_embeds = self._embed(input_ids, inputs_embeds, slot_mask, context_embeds, context_word_ids)
            input_ids = None  # the backbone takes one of the two
            settings = resolve_settings(self.config, self.layer_costs, rows, self.training, *wanted)
            check_slots_after_cache(self.config, rows, cache, context_passage_ids, *wanted)
            kwargs["slots"] = slots = Slots(rows, settings, RecordedDepths(), SharedStepInputs())
        outputs = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )
        return ArcAlignerModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            **{CACHE: cache_of(outputs)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=slots.stacked_depths(self.config.text_config.num_hidden_layers) if has_slots else None,
        )

    def _no_slots(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The slot mask, embeddings and words of an input (batch, seq_len, ...) without slots."""
        slot_mask = torch.zeros(given.shape[:2], dtype=torch.bool, device=given.device)
        embeds = torch.zeros(len(given), 0, self.config.encoder_hidden_size, device=given.device)
        return slot_mask, embeds, slot_mask.new_zeros(len(given), 0, 1).long() if self.config.word_parts else None

    def _check_slot_inputs(self, slot_mask, input_ids, inputs_embeds, context_embeds, context_word_ids) -> None:
        if inputs_embeds is not None and input_ids is not None:
            raise ValueError("Got `inputs_embeds` and `input_ids`. Pass one of them, with slots `input_ids`.")
        check_adapters(self.backbone)
        check_context_embeds(self.config, slot_mask, context_embeds)
        check_word_ids(self.config, context_embeds, context_word_ids)

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
            return None  # reading them would make the host wait for the device
        check_ids(input_ids, "`input_ids`", self.config.text_config.vocab_size, (self.config.context_token_id,))
        slot_mask = input_ids == self.config.context_token_id
        if context_embeds is None:
            if slot_mask.any():
                raise ValueError(
                    f"Found {int(slot_mask.sum())} context tokens (id {self.config.context_token_id}) in `input_ids` "
                    "but no `context_embeds`. Pass the embeddings of the slots, as the processor returns them."
                )
            return None
        return slot_mask

    def _keep_passages_apart(
        self, slot_mask, context_embeds, passage_ids, attention_mask, position_ids, cache
    ) -> tuple[torch.Tensor, torch.LongTensor]:
        """The mask and the positions of a prompt whose passages do not read each other."""
        check_passage_ids(passage_ids, context_embeds, slot_mask)
        check_can_separate(self.config.text_config)
        placed = place_passage_ids(slot_mask, passage_ids)  # (batch, seq_len)
        if position_ids is None:
            is_2d = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
            is_real = attention_mask[:, : slot_mask.shape[1]] if is_2d else torch.ones_like(slot_mask)
            position_ids = passage_positions(placed, is_real)
        is_static = cache is not None and cache.is_compileable  # then keys have columns for room that is left
        num_keys = cache.get_mask_sizes(slot_mask.shape[1], 0)[0] if is_static else None
        return separate_passages(attention_mask, placed, self.dtype, num_keys), position_ids

    @torch.compiler.disable  # runs on the CPU
    def _find_slots(self, slot_mask, attention_mask, context_embeds) -> SlotRows:
        is_text = ~slot_mask  # without a 2-D mask padding counts as text; the layers' own masks hide it then
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            is_text = is_text & attention_mask[:, -slot_mask.shape[1] :].bool()  # a cache has columns before
        is_slot, is_text, *found = to_numpy_in_one_sync(
            slot_mask,
            is_text,
            (context_embeds.abs() < LARGEST_VALUE).all(dim=2),  # (batch, max_slots), False for NaN
            context_embeds.ne(0).any(dim=2),  # (batch, max_slots)
        )
        check_slots(is_slot, *found)
        return find_slot_rows(is_slot, is_text, context_embeds.shape[1], slot_mask.device)

    def _embed(self, input_ids, inputs_embeds, slot_mask, context_embeds, context_word_ids) -> torch.Tensor:
        """`H^(0,0)` (Eq. 2): projected embeddings on slots, frozen ones elsewhere, (batch, seq_len, hidden)."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids.masked_fill(slot_mask, 0))
        if context_embeds.shape[1] == 0:  # the sum is 0, and tells its gradient so
            return inputs_embeds + self.project(context_embeds, context_word_ids).sum().to(inputs_embeds.dtype)
        # A NaN in the padding would not be read, but its gradient would.
        is_real = torch.arange(context_embeds.shape[1], device=slot_mask.device) < slot_mask.sum(dim=1, keepdim=True)
        context_embeds = context_embeds.masked_fill(~is_real[:, :, None], 0.0)
        slot_embeds = self.project(context_embeds, context_word_ids)  # (batch, max_slots, hidden)
        placed = take_rows(slot_embeds.to(inputs_embeds.dtype), slot_mask.cumsum(dim=1) - 1)  # as `inputs_embeds`
        return torch.where(slot_mask[:, :, None], placed, inputs_embeds)

    def project(self, context_embeds: torch.Tensor, context_word_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """Slots (batch, max_slots, hidden) as the first layer reads them (Eq. 1), with their words where it has any."""
        if not self.config.word_parts:
            return self.projector(context_embeds)
        table = self.get_input_embeddings().weight
        return self.projector(context_embeds, self.projector.average_words(context_word_ids, table))


# The frozen head and the loss (Eq. 10)


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Positions of `hidden_states` (batch, seq_len, hidden) that logits are computed for: the last ones, 0 for all, or
    those of a tensor, (positions,) for all rows or (batch, positions)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() == 2:
        return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]


def postprocess_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """What backbones do to logits after the head: Cohere scales, Granite divides where HyperCLOVA X multiplies, Gemma 2
    and 3 cap softly."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


# Rows of logits that exist at a time: 50 MB of them for a vocabulary of 49,152.
HEAD_ROWS = 256


class _HeadLoss(torch.autograd.Function):
    """The gradient for the hidden states is made in the forward pass, a few rows at a time, so that the logits of all
    rows never exist at once: on CPUs they and their softmax cost more than all decoder layers of a small backbone, on
    GPUs they take most of the memory."""

    @staticmethod
    def forward(ctx, hidden_states, targets, head, text_config):
        total, gradients = torch.zeros((), device=hidden_states.device), []
        for states, wanted in zip(hidden_states.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            states = states.detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(states.requires_grad):
                logits = head(states)  # (rows, vocab_size)
                logits = postprocess_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), text_config)
                nll = nn.functional.cross_entropy(logits, wanted, reduction="sum")
            gradients += torch.autograd.grad(nll, states) if states.requires_grad else ()
            total = total + nll.detach()
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        (gradient,) = ctx.saved_tensors
        # In float32 at least: a scaler's factor may be more than float16 holds.
        return (gradient.to(d_total.dtype) * d_total).to(gradient.dtype), None, None, None


def head_nll(
    hidden_states: torch.Tensor, targets: torch.LongTensor, head: nn.Linear, text_config: PreTrainedConfig
) -> torch.Tensor:
    """Sum of the negative log-likelihoods of `targets` (rows,) through a frozen head, from `hidden_states`
    (rows, hidden). It cannot be differentiated twice.

    Raises:
        `ValueError`: a head that is trained: it gets no gradient here.
    """
    if any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError("The head is trained, but without logits it gets no gradient. Freeze it, or keep the logits.")
    return _HeadLoss.apply(hidden_states, targets, head, text_config)


class ArcAlignerForCausalLM(ArcAlignerPreTrainedModel, SlotGenerationMixin):
    """A frozen language model that reads passages as context slots.

    ```python
    >>> processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
    >>> model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    >>> options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    >>> inputs = processor.apply_chat_template([{"role": "user", "content": "Who?"}], documents=["Ada did."], **options)
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
        context_word_ids: torch.LongTensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs,
    ) -> ArcAlignerCausalLMOutputWithPast:
        r"""
        Args:
            input_ids, context_embeds, context_word_ids, context_passage_ids: As for [`ArcAlignerModel`].
            labels (`torch.LongTensor` of shape `(batch, seq_len)`, *optional*):
                Targets of the NLL (Eq. 10) of all three stages; -100 is ignored, and so is a context token.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0): Last positions to compute logits for, 0 for all.
            skip_logits (`bool`, defaults to `False`):
                With `labels`, compute only the loss: the frozen head reads some labeled positions at a time, and no
                logits are kept. For training.
            kwargs: `gate_mode`, `gate_threshold`, `max_refinement_steps`, `refinement_budget` and `cache` of
                [`ArcAlignerModel`], and what the backbone takes.
        """
        if labels is not None:
            check_ids(labels, "`labels`", self.config.text_config.vocab_size, (-100, self.config.context_token_id))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            context_embeds=context_embeds,
            context_word_ids=context_word_ids,
            context_passage_ids=context_passage_ids,
            use_cache=use_cache,
            **kwargs,
        )
        if skip_logits:
            loss = self._loss_without_logits(outputs.last_hidden_state, labels, kwargs.get("num_items_in_batch"))
            return ArcAlignerCausalLMOutputWithPast(
                loss=loss, hidden_states=outputs.hidden_states, recursion_depth=outputs.recursion_depth
            )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        # Flattened to (batch * kept, hidden): for a frozen head, a batched product would copy the weight.
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
            **{CACHE: cache_of(outputs)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=outputs.recursion_depth,
        )

    def _loss_without_logits(self, hidden_states, labels, num_items_in_batch=None) -> torch.Tensor:
        """The mean NLL (Eq. 10) of the labeled positions; `hidden_states` (batch, seq_len, hidden)."""
        targets = labels[:, 1:].flatten()  # (batch * (seq_len - 1),)
        is_target = (targets != -100) & (targets != self.config.context_token_id)
        predicting = hidden_states[:, :-1].flatten(0, 1)[is_target]  # (num_targets, hidden)
        nll = head_nll(predicting, targets[is_target], self.lm_head, self.config.text_config)
        return nll / (is_target.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


ArcAlignerForCausalLM.register_for_auto_class("AutoModelForCausalLM")
