"""The losses of training: a frozen head without logits, slots that name their words, compiled layers; token spans."""

import copy

import pytest
import torch
from tiny_models import BACKBONES, backbone_config, collate, random_rows, tiny_aligner
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedConfig

from arcaligner import modeling_arcaligner
from arcaligner.modeling_arcaligner import head_nll, postprocess_logits


@pytest.mark.parametrize("rows_at_a_time, bias", [(3, True), (256, False)])
@pytest.mark.parametrize(
    "settings", [{}, {"logits_scaling": 8.0}, {"logit_scale": 3.0, "final_logit_softcapping": 2.0}], ids=str
)
def test_frozen_head_loss(monkeypatch, settings, bias, rows_at_a_time):
    """The frozen head gives loss and gradient of cross entropy."""

    def plain_nll(states, targets, head, config):
        return cross_entropy(postprocess_logits(head(states), config), targets, reduction="sum")

    monkeypatch.setattr(modeling_arcaligner, "HEAD_POSITIONS", rows_at_a_time)
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias, dtype=torch.float64).requires_grad_(False)
    hidden, targets = torch.randn(10, 6, dtype=torch.float64) * 3, torch.randint(11, (10,))
    results = []
    for nll in (head_nll, plain_nll):
        states = hidden.clone().requires_grad_()
        loss = nll(states, targets, head, PreTrainedConfig(**settings))
        (loss * 0.7).backward()
        results.append((loss.detach(), states.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_trained_head_is_refused():
    """A trained head and a second derivative are refused."""
    states, targets = torch.randn(4, 6, requires_grad=True), torch.randint(11, (4,))
    with pytest.raises(ValueError, match="head gets no gradient, but it requires one"):
        head_nll(states, targets, nn.Linear(6, 11), PreTrainedConfig())
    loss = head_nll(states, targets, nn.Linear(6, 11).requires_grad_(False), PreTrainedConfig()) ** 2
    (gradient,) = torch.autograd.grad(loss, states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_scaled_float16_loss():
    """A scaled loss of float16 states has a finite gradient."""
    head = nn.Linear(6, 11, bias=False, dtype=torch.float16).requires_grad_(False)
    states = torch.full((1, 6), 0.01, dtype=torch.float16, requires_grad=True)
    (head_nll(states, torch.tensor([3]), head, PreTrainedConfig()) * 65536.0).backward()
    expected = states.detach().float().requires_grad_()
    (cross_entropy(expected @ head.weight.float().T, torch.tensor([3])) * 65536.0).backward()
    assert states.grad.isfinite().all()
    torch.testing.assert_close(states.grad.float(), expected.grad, rtol=5e-3, atol=1.0)


@pytest.mark.parametrize("backbone", list(BACKBONES))
def test_loss_without_logits(backbone):
    """Loss and gradients are the same without logits, for each backbone and each number of items."""
    model = tiny_aligner(backbone, dtype=torch.float32).train()
    model.set_stage("gating")
    batch = collate(random_rows(model, [3, 6, 1, 4]))
    for more in ({}, {"num_items_in_batch": 17}):
        losses, gradients = [], []
        for skip_logits in (False, True):
            model.zero_grad()
            outputs = model(**batch, skip_logits=skip_logits, **more)
            outputs.loss.backward()
            losses.append(outputs.loss.detach())
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert outputs.logits is None
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
    assert any("projector" in name and gradient.abs().max() > 1e-5 for name, gradient in gradients[0].items())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # the graph of training without a minute of C++
def test_compiled_loss_and_gradients(backend):
    """Compiled layers give the loss and gradients of plain ones."""
    plain = tiny_aligner(backbone_config("llama", num_hidden_layers=1), dtype=torch.float32).train()
    plain.set_stage("reconstruction")
    compiled = copy.deepcopy(plain)
    for layer in compiled.model.decoder_layers:
        layer.compile(dynamic=True, fullgraph=True, backend=backend)
    batch = collate(random_rows(plain, [2, 0, 3]), "left")
    results = []
    for model in (plain, compiled):
        loss = model(**batch, skip_logits=True, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_spans_share_the_tokens(processor):
    """Each span is the normalized mean of the states of its tokens; the title is left out."""
    title, text = "Toronto: ", "Radik Zhaparov is a Kazakh ski jumper who has competed since 2003."
    ends = [len(title) + end for end in (14, 15, 40, len(text))]  # the second run is a space, without a token
    model = processor.encoder.model.eval()
    runs = processor.encoder.encode_spans([title + text], [len(title)], [ends])
    encoded = model.tokenizer(title + text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0]
    with torch.no_grad():
        states = model[0](dict(encoded))["token_embeddings"][0]
    is_own = offsets[:, 1] > offsets[:, 0]  # the token is not empty
    states, middles = states[is_own], offsets[is_own].float().mean(dim=1)
    for run, start, end in zip(runs, [len(title), *ends], ends, strict=False):
        inside = (middles > start) & (middles <= end)
        if not inside.any():
            inside = torch.arange(len(middles)) == (middles - (start + end) / 2).abs().argmin()
        torch.testing.assert_close(run, normalize(states[inside].mean(dim=0), dim=0), rtol=1e-5, atol=1e-6)
