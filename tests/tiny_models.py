"""Tiny random models, prompts and batches for the tests: no download, built in milliseconds.

`tiny_aligner("gemma2")` gives an `ArcAlignerForCausalLM` around a random Gemma-2 whose aligner parts are all random
too (LoRA B and gates not zero), so that a test that compares two ways of computing sees every part of the method.
`random_rows` gives prompts with slots at random places and `collate` pads them to a batch.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM

VOCAB_SIZE = 61
ENCODER_HIDDEN_SIZE = 10
IGNORED = -100

COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HYBRID_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 5  # shorter than the test prompts, so that it matters

GEMMA = {"sliding_window": WINDOW, "layer_types": HYBRID_LAYERS, "query_pre_attn_scalar": 8}
# Test name -> (model_type, differences from COMMON). The scales are far from 1, so that a missing one is noticed.
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": HYBRID_LAYERS}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "phi3": ("phi3", {"hidden_size": 32, "sliding_window": None}),
    "phi3_window": ("phi3", {"hidden_size": 32, "sliding_window": WINDOW}),
    "olmo2": ("olmo2", {"hidden_size": 32}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "granite",
        {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    ),
    "cohere": ("cohere", {"hidden_size": 32, "logit_scale": 0.25, "use_qk_norm": True}),
}


@dataclass
class Row:
    """One prompt: ids `(length,)`, embeddings of its slots `(num_slots, width)` and labels `(length,)`."""

    input_ids: torch.Tensor
    context_embeds: torch.Tensor
    labels: torch.Tensor


class float64_throughout(TorchFunctionMode):  # noqa: N801 (used like a function)
    """Turns casts to float32 into casts to float64.

    Backbones compute norms, rotary angles and softmax in float32 whatever the weights are; two correct ways to compute
    the same gradient then differ by 1e-7. Inside this mode a float64 model computes everything in float64.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(argument):
            return torch.float64 if argument is torch.float32 else argument

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{name: wide(argument) for name, argument in (kwargs or {}).items()})


def backbone_config(name: str = "llama", **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of a backbone family by its name in `BACKBONES`."""
    model_type, settings = BACKBONES[name]
    return AutoConfig.for_model(model_type, **{**COMMON, **settings, **changes})


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws random values for all parameters, large enough that each layer, LoRA and gate has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 and "slot_gate" not in name:
                parameter.add_(0.1 * noise)  # norm weights and biases
            elif name.endswith("slot_gate.out.bias"):
                parameter.zero_()  # as many open as closed gates
            elif "slot_gate" in name:
                parameter.copy_(noise)
            elif "projector" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def tiny_aligner(
    backbone: str | PreTrainedConfig = "llama",
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    attn_implementation: str | None = None,
    **settings: Any,
) -> ArcAlignerForCausalLM:
    """A random aligner in evaluation mode; `settings` change its `ArcAlignerConfig`."""
    text_config = backbone_config(backbone) if isinstance(backbone, str) else backbone
    sizes = {"encoder_hidden_size": ENCODER_HIDDEN_SIZE, "lora_r": 4, "gate_hidden_size": 7}
    settings = sizes | {"lora_alpha": 6, "lora_dropout": 0.0} | settings
    torch.manual_seed(seed)
    config = ArcAlignerConfig(text_config=text_config, **settings)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    model = ArcAlignerForCausalLM(config)
    randomize(model, seed)
    return model.to(dtype).eval()


def random_head(
    model: ArcAlignerForCausalLM,
    layers: list[int] | None = None,
    threshold: float = 0.5,
    match: tuple[float, float, float] | None = None,
) -> None:
    """Gives `model` a random answerability head, by default for the first and the last layer."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    model.set_answerability_layers(layers or [0, config.text_config.num_hidden_layers - 1])
    head = model.answerability_head.to(model.dtype)
    head.weight.copy_(0.1 * torch.randn(head.weight.numel(), generator=generator).view(head.weight.shape))
    head.bias.fill_(0.1)
    if match is not None:
        head.match.copy_(torch.tensor(match))
    config.answerability_uses_match, config.answerability_threshold = match is not None, threshold


def random_row(
    model: ArcAlignerForCausalLM, num_slots: int, *, seed: int = 0, num_text: int = 9, contiguous: bool = False
) -> Row:
    """`num_text` random words and `num_slots` slots among them; half of the words carry a label."""
    generator = torch.Generator().manual_seed(seed)
    length = num_text + num_slots
    ids = torch.randint(3, VOCAB_SIZE - 1, (length,), generator=generator)  # the last id may be the context token
    if contiguous:  # as the processor writes them: some text, the slots, more text
        positions = torch.arange(num_slots) + num_text // 3
    else:
        positions = torch.randperm(length, generator=generator)[:num_slots]
    ids[positions] = model.config.context_token_id
    has_label = torch.rand(length, generator=generator) < 0.5
    has_label[0], has_label[-1] = False, True
    labels = torch.where(has_label & (ids != model.config.context_token_id), ids, IGNORED)
    embeds = torch.randn(num_slots, model.config.encoder_hidden_size, generator=generator, dtype=torch.float64)
    return Row(ids, embeds.to(model.dtype), labels)


def random_rows(model: ArcAlignerForCausalLM, slot_counts: list[int], *, seed: int = 0, **shape: Any) -> list[Row]:
    """One random row per entry of `slot_counts`, of different lengths."""
    num_text = shape.pop("num_text", 7)
    return [
        random_row(model, count, seed=100 * seed + i, num_text=num_text + (3 * i + seed) % 5, **shape)
        for i, count in enumerate(slot_counts)
    ]


def collate(rows: list[Row], padding_side: str = "right", pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Rows to one batch: text padded at `padding_side`, embeddings always at the end, positions without padding."""
    pad = partial(pad_sequence, batch_first=True, padding_side=padding_side)
    batch = {
        "input_ids": pad([row.input_ids for row in rows], padding_value=pad_token_id),
        "attention_mask": pad([torch.ones_like(row.input_ids) for row in rows]),
        "labels": pad([row.labels for row in rows], padding_value=IGNORED),
    }
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if any(len(row.context_embeds) for row in rows):
        batch["context_embeds"] = pad_sequence([row.context_embeds for row in rows], batch_first=True)
    return batch


def for_generate(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that a processor would return, without labels and positions."""
    return {key: value for key, value in batch.items() if key not in ("labels", "position_ids")}
