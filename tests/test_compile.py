"""`torch.compile`: decoding as a whole, as `generate` does it, and decoder layers one by one with slots.

What is traced is run by the `eager` backend, so that a graph break, a recompilation or a read of the host is found
without compiling anything. Training with compiled layers is tested in tests/train/test_losses.py.
"""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import EXACT
from tiny_models import backbone_config, collate, for_generate, random_rows, tiny_aligner
from transformers import CompileConfig, DynamicCache, StaticCache

# The softmax of Gemma 2 is float32, where the masks of a float64 model are infinite and padding becomes NaN.
FAMILIES = [("llama", torch.float64, EXACT), ("gemma2", torch.float32, {"rtol": 1e-4, "atol": 1e-4})]
CALLS = [([4, 0, 9, 1], {}), ([9, 3, 0], {}), ([2, 7], {"gate_threshold": 0.3}), ([2, 7], {"gate_mode": "off"})]


@pytest.fixture
def traced():
    """A backend that runs each traced graph as it is, and the list of these graphs."""
    torch._dynamo.reset()
    graphs = []
    return lambda graph, _: graphs.append(graph) or graph.forward, graphs


def batch_of(model, slot_counts):
    return for_generate(collate(random_rows(model, slot_counts, seed=slot_counts[0], contiguous=True), "left"))


def compile_layers(model, backend):
    for layer in model.model.backbone.layers:
        layer.compile(fullgraph=True, backend=backend, dynamic=True)


def assert_same(output, expected, **tolerance):
    assert torch.equal(output.recursion_depth, expected.recursion_depth)
    torch.testing.assert_close((output.logits, output.attentions), (expected.logits, expected.attentions), **tolerance)
    keys, expected_keys = ([layer.keys for layer in one.past_key_values.layers] for one in (output, expected))
    torch.testing.assert_close(keys, expected_keys, **tolerance)


@pytest.mark.parametrize(("backbone", "dtype", "tolerance"), FAMILIES)
def test_decoding_is_traced_once(backbone, dtype, tolerance, traced):
    """Decoding is traced once, as one graph, and gives the same logits as without compilation."""
    model = tiny_aligner(backbone, dtype=dtype)
    batch = batch_of(model, [4, 0, 9, 1])
    settings = {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**batch, **settings)
    backend, graphs = traced
    config = CompileConfig(backend=backend, mode="default", fullgraph=True)
    config._compile_all_devices = True  # as `generate` does by itself on a GPU
    output = model.generate(**batch, **settings, cache_implementation="static", compile_config=config)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), **tolerance)
    assert 1 <= len(graphs) <= 2  # for all tokens; a sliding cache may take another one


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "dtype", "tolerance"), FAMILIES)
def test_compiled_layers_match_plain(backbone, dtype, tolerance, traced):
    """Compiled layers refine as plain ones, and share code at any threshold."""
    model, plain = (tiny_aligner(backbone, dtype=dtype) for _ in range(2))
    compile_layers(model, traced[0])
    counts = []
    with ThreadPoolExecutor(1) as pool:  # each thread stores which rows are slots, and this thread has not run yet
        for slot_counts, gates in CALLS:
            batch = batch_of(model, slot_counts)
            output = pool.submit(torch.no_grad()(model), **batch, **gates).result()
            assert_same(output, plain(**batch, **gates), **tolerance)
            counts.append(len(traced[1]))
    assert 2 <= counts[0] == counts[1] == counts[2] < counts[3]  # another gate mode is compiled separately


@torch.no_grad()
def test_unsupported_cases_run_uncompiled(traced):
    model, compiled = (tiny_aligner(backbone_config("llama", attn_implementation="eager")) for _ in range(2))
    compile_layers(compiled, traced[0])
    batch = batch_of(model, [4, 0, 9, 1])
    static = functools.partial(StaticCache, model.config.text_config, max_cache_len=30)
    for options in ({"refinement_budget": 0.5}, {"output_attentions": True}):
        assert_same(compiled(**batch, **options), model(**batch, **options), **EXACT)
    for new_cache in (DynamicCache, static):  # caches that have no layers yet
        actual, expected = (aligner(**batch, past_key_values=new_cache()) for aligner in (compiled, model))
        assert_same(actual, expected, **EXACT)
    assert not traced[1]


@torch.no_grad()
def test_compiled_copies_and_models(traced):
    """A copy of a compiled model uses its own weights, and a whole model may be compiled."""
    model, other = tiny_aligner("llama", seed=1), tiny_aligner("llama", seed=2)
    batch = batch_of(model, [4, 0, 9, 1])
    compile_layers(model, traced[0])
    model_copy = copy.deepcopy(model)
    model_copy.load_state_dict(other.state_dict())
    assert_same(model_copy(**batch), other(**batch), **EXACT)
    assert_same(torch.compile(other, backend="eager")(**batch), other(**batch), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("gate_mode", ["off", "adaptive"])
def test_compiled_model_moves_passages(gate_mode):
    """A whole model with independent passages of different lengths may be compiled."""
    settings = {"passage_attention": "separate", "passage_alignment": "end", "gate_mode": gate_mode}
    model = tiny_aligner("llama", **settings)
    batch = batch_of(model, [6]) | {"context_passage_ids": torch.tensor([[0, 0, 0, 1, 2, 2]])}
    batch.pop("position_ids", None)
    assert_same(torch.compile(model, backend="eager")(**batch), model(**batch), rtol=1e-5, atol=1e-5)
