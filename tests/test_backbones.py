"""Properties of every supported backbone family, tested on a tiny random model of each.

Text alone is the base model bit for bit; slots follow Algorithm 1; padding, batching, caches, attention kernels and
gradient checkpointing change nothing. Unsupported families are refused by name.
"""

import pytest
import torch
from reference import EXACT, assert_matches_reference, loss_gradients, stock_model
from tiny_models import BACKBONES, COMMON, VOCAB_SIZE, collate, for_generate, random_rows, tiny_aligner
from transformers import AutoConfig, DynamicCache

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM, ArcAlignerModel

SLOT_COUNTS = [4, 0, 9, 1]

in_float64 = pytest.mark.usefixtures("float64_model_code")
every_backbone = pytest.mark.parametrize("backbone", list(BACKBONES))


# Text without slots


@every_backbone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_text_equals_the_base_model(backbone, dtype, attention):
    """Text without slots gives the logits of the base model bit for bit."""
    if backbone == "gemma2":
        attention = "eager"  # the only one it has
    model = tiny_aligner(backbone, dtype=dtype, attn_implementation=attention)
    # As `from_pretrained` leaves it. Frozen, its head would be a batched product, which rounds otherwise.
    base = stock_model(model, dtype, attention).requires_grad_(True)
    batch = for_generate(collate(random_rows(model, [0, 0, 0], num_text=14), "left"))
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, base(**batch).logits)
        assert torch.equal(model(**batch, logits_to_keep=1).logits, base(**batch, logits_to_keep=1).logits)
    settings = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    assert torch.equal(model.generate(**batch, **settings), base.generate(**batch, **settings))


def test_backbone_with_scaled_logits():
    """A backbone that multiplies its logits by a scale still does so."""
    pytest.importorskip("transformers.models.hyperclovax")
    settings = COMMON | {"logits_scaling": 3.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    model = tiny_aligner(AutoConfig.for_model("hyperclovax", **settings), dtype=torch.float32)
    ids, base = torch.arange(3, 20)[None], stock_model(model, torch.float32, "sdpa").requires_grad_(True)
    torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=0, atol=0)


# Algorithm 1


@in_float64
@every_backbone
@pytest.mark.parametrize("padding_side, attention", [("left", "sdpa"), ("right", "eager")])
def test_kernels_follow_algorithm_1(backbone, padding_side, attention):
    """In each kernel, each row of slots follows Algorithm 1."""
    if backbone == "gemma2":
        attention = "eager"  # the only one it has
    model = tiny_aligner(backbone, attn_implementation=attention)
    assert model.config.text_config._attn_implementation == attention
    rows = random_rows(model, SLOT_COUNTS)
    assert_matches_reference(model, rows, padding_side)
    torch.testing.assert_close(*loss_gradients(model, rows, padding_side), **EXACT)


# Caches and generation


@in_float64
@every_backbone
def test_generate_equals_teacher_forcing(backbone):
    """Each generated token is the argmax of one plain forward, for left-padded rows with any number of slots."""
    model = tiny_aligner(backbone)
    rows = random_rows(model, [3, 6, 0], seed=3, contiguous=True, num_text=9)
    batch = for_generate(collate(rows, "left"))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}
    generated = model.generate(**batch, **settings, past_key_values=DynamicCache(), return_dict_in_generate=True)
    for i, row in enumerate(rows):
        ids = torch.cat([row.input_ids, generated.sequences[i, -6:]])[None]
        embeds = row.context_embeds[None] if len(row.context_embeds) else None
        with torch.no_grad():
            forced = model(ids, context_embeds=embeds).logits[0, -7:-1]
        torch.testing.assert_close(torch.stack(generated.logits)[:, i], forced, **EXACT)
    uncached = model.generate(**batch, **settings, use_cache=False)
    assert torch.equal(uncached, generated.sequences)


@pytest.mark.parametrize("context_token_id", [VOCAB_SIZE, VOCAB_SIZE - 1])
def test_context_token_is_never_generated(context_token_id):
    """The context token is not generated, even if its id is in the vocabulary and has the highest logit."""
    model = tiny_aligner("llama", context_token_id=context_token_id)
    with torch.no_grad():
        model.lm_head.weight[-1] = 50 * model.lm_head.weight[3]
    inputs = for_generate(collate(random_rows(model, [4], contiguous=True)))
    for settings in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 3}, {"repetition_penalty": 1.3}):
        ids = model.generate(**inputs, **settings, max_new_tokens=12, min_new_tokens=12)
        assert not (ids[:, inputs["input_ids"].shape[1] :] == context_token_id).any()


# Kernels, checkpointing, precision


@pytest.mark.parametrize("backbone", ["llama", "gemma3_text", "phi3_window", "cohere"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(backbone, reentrant):
    """Gradients are equal with dropout, whose masks have to be the same in the second run, and with gates of a call."""
    model = tiny_aligner(backbone, lora_dropout=0.3, dtype=torch.float32).train()
    model.set_stage("gating")
    batch = collate(random_rows(model, SLOT_COUNTS), "left")

    def gradients():
        torch.manual_seed(7)
        model.zero_grad()
        model(**batch, use_cache=False, gate_threshold=0.3, max_refinement_steps=1).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), expected)
    assert any("slot_gate" in name and grad.abs().max() > 0 for name, grad in expected.items())


@pytest.mark.parametrize("backbone", ["llama", "gemma2", "phi3", "smollm3", "granite", "cohere"])
def test_bf16_backbone_with_fp32_aligner(backbone, tmp_path):
    high_model = tiny_aligner(backbone, dtype=torch.float32)
    high_model.save_pretrained(tmp_path, save_base_model=True)
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    headless = ArcAlignerModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in [*model.named_parameters(), *headless.named_parameters()]:
        is_aligner = any(part in f".{name}" for part in (".lora_", ".slot_gate.", ".projector."))
        assert parameter.dtype == (torch.float32 if is_aligner else torch.bfloat16), name
    batch = collate(random_rows(high_model, SLOT_COUNTS), "left")
    with torch.no_grad():
        low, high = model.eval()(**batch), high_model(**batch)
    assert low.logits.isfinite().all()
    assert abs(low.loss - high.loss) < 0.1 * abs(high.loss)
    model.train().set_stage("gating")
    model(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.eval().generate(**for_generate(batch), max_new_tokens=3)


# Refused backbones

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
REFUSED = {  # model_type -> (settings, a word of the reason)
    "mamba": ({"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 50}, "layers"),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "layers"),
    "t5": ({"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
    "vit": ({}, "causal language model"),
    "gemma3": ({}, "text"),  # with pictures: its text part is supported
    "mixtral": ({**SMALL, "num_local_experts": 2}, "experts"),
    "qwen3_next": ({**SMALL, "head_dim": 8}, "linear_attention"),
    "minicpm3": ({**SMALL, **LATENT}, "cache"),  # a linear of its attention reads cached rows
    "modernbert-decoder": (SMALL, "head"),  # more than one linear
    "gemma3n_text": ({**SMALL, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}, "layers"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsupported_backbone_is_named(model_type):
    """An unsupported backbone is refused by name, with the reason."""
    settings, reason = REFUSED[model_type]
    text_config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(ValueError, match=rf"(?s)`{model_type}`.*({reason})"):
        ArcAlignerForCausalLM(ArcAlignerConfig(text_config=text_config))
