"""`torch.compile`: decoding as a whole, as `generate` does it, and decoder layers one by one with slots.

What is traced is run by the `eager` backend, so that a graph break, a recompilation or a read of the host is found
without compiling anything; one test goes through the real compiler.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.config
from reference import EXACT
from tiny_models import backbone_config, collate, for_generate, random_row, random_rows, tiny_aligner
from transformers import CompileConfig, DynamicCache, StaticCache

# The softmax of Gemma 2 is float32, where the masks of a float64 model are infinite and padding becomes NaN.
FAMILIES = {"llama": (torch.float64, EXACT), "gemma2": (torch.float32, {"rtol": 1e-4, "atol": 1e-4})}
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch_of(model, slot_counts, side="left", seed=0):
    return for_generate(collate(random_rows(model, slot_counts, seed=seed, contiguous=True), side))


def prompts_of(model, sizes):
    """One row each of (slots, text), the slots together after a third of the text."""
    rows = [random_row(model, slots, num_text=text, seed=text, contiguous=True) for slots, text in sizes]
    return [for_generate(collate([row])) for row in rows]


def graph_collector():
    """A backend that runs what was traced as it is, and the list of it."""
    graphs = []

    def run(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return run, graphs


def compile_layers(model, **kwargs):
    """Compiles the layers as a user would, by default only traced; returns the list that fills with graphs."""
    backend, graphs = graph_collector()
    for layer in model.model.backbone.layers:
        layer.compile(**{"fullgraph": True, "backend": backend, **kwargs})
    return graphs


def assert_same(output, expected, **tolerance):
    tolerance = tolerance or EXACT
    torch.testing.assert_close(output.logits, expected.logits, **tolerance)
    assert torch.equal(output.recursion_depth, expected.recursion_depth)
    for layer, expected_layer in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected_layer.keys, **tolerance)
        torch.testing.assert_close(layer.values, expected_layer.values, **tolerance)


# --- Decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", list(FAMILIES))
def test_decoding_traces_whole_and_once_and_gives_the_logits_of_a_dynamic_cache(backbone):
    dtype, tolerance = FAMILIES[backbone]
    model = tiny_aligner(backbone, dtype=dtype)
    batch = batch_of(model, [4, 0, 9, 1])
    settings = {**GREEDY, "max_new_tokens": 10, "min_new_tokens": 10}
    expected = model.generate(**batch, **settings)
    static = model.generate(**batch, **settings, cache_implementation="static")
    assert torch.equal(static.sequences, expected.sequences)
    backend, graphs = graph_collector()
    config = CompileConfig(backend=backend, mode="default", fullgraph=True)
    config._compile_all_devices = True  # as `generate` does by itself on a GPU
    output = model.generate(**batch, **settings, cache_implementation="static", compile_config=config)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), **tolerance)
    assert 1 <= len(graphs) <= 2  # for all tokens; a sliding cache may take another one


# --- Decoder layers with slots --------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "gate_mode"), [("llama", "off"), ("llama", "always"), ("gemma2", "adaptive")])
def test_compiled_layers_refine_as_uncompiled_ones_do(backbone, gate_mode):
    dtype, tolerance = FAMILIES[backbone]
    model = tiny_aligner(backbone, dtype=dtype)
    batches = [batch_of(model, [4, 0, 9, 1]), batch_of(model, [2, 5], "right", seed=1)]
    expected = [model(**batch, gate_mode=gate_mode) for batch in batches]
    graphs = compile_layers(model, dynamic=True)
    for batch, each in zip(batches, expected, strict=True):
        assert_same(model(**batch, gate_mode=gate_mode), each, **tolerance)
    assert graphs


def batches_of_any_length(model):
    return [batch_of(model, counts, seed=i) for i, counts in enumerate([[4, 2], [9, 3, 0], [2, 7, 5, 6]])]


def prompts_with_slots_elsewhere(model):
    return prompts_of(model, [(4, 9), (5, 12), (7, 15), (3, 21), (6, 18)])


@torch.no_grad()
@pytest.mark.parametrize("prompts", [batches_of_any_length, prompts_with_slots_elsewhere])
def test_layers_share_compiled_code(prompts):
    model = tiny_aligner(backbone_config("llama", num_hidden_layers=4))
    batches = prompts(model)
    expected = [model(**batch) for batch in batches]
    graphs = compile_layers(model, dynamic=True)
    for batch, each in zip(batches, expected, strict=True):
        assert_same(model(**batch), each)
    assert len(graphs) == 2  # the last layer refines nothing


@torch.no_grad()
def test_layers_compiled_as_the_first_thing_in_a_thread_read_slots():
    model = tiny_aligner("llama")
    batch = batch_of(model, [4, 0, 9, 1])
    graphs = compile_layers(model)
    with ThreadPoolExecutor(1) as pool:  # which rows are slots is kept by thread
        output = pool.submit(torch.no_grad()(model), **batch).result()
    assert_same(output, tiny_aligner("llama")(**batch))
    assert graphs


@torch.no_grad()
def test_another_threshold_or_mode_traces_again_and_is_obeyed():
    model = tiny_aligner("llama")
    batch = batch_of(model, [4, 0, 9, 1])
    wanted = [{"gate_threshold": 0.3}, {"gate_threshold": 0.6}, {"max_refinement_steps": 1}, {"gate_mode": "always"}]
    expected = [model(**batch, **settings) for settings in wanted]
    assert len({int(each.recursion_depth.sum()) for each in expected}) == len(wanted)
    compile_layers(model)
    for settings, each in zip(wanted, expected, strict=True):
        assert_same(model(**batch, **settings), each)


@torch.no_grad()
@pytest.mark.parametrize(
    "asked",
    [
        lambda: {"refinement_budget": 0.5},
        lambda: {"output_attentions": True},
        lambda: {"past_key_values": DynamicCache()},  # without layers yet
    ],
    ids=["budget", "attentions", "cache"],
)
def test_what_compiled_code_cannot_do_runs_without_it(asked):
    model = tiny_aligner(backbone_config("llama", attn_implementation="eager"))
    batch = batch_of(model, [4, 0, 9, 1])
    expected = model(**batch, **asked())
    graphs = compile_layers(model)
    output = model(**batch, **asked())
    assert_same(output, expected)
    torch.testing.assert_close(output.attentions, expected.attentions)
    assert not graphs


@torch.no_grad()
@pytest.mark.parametrize("laid_out", [True, False])
def test_compiled_layers_fill_a_static_cache(laid_out):
    model = tiny_aligner("llama")
    batch = batch_of(model, [4, 0, 9, 1])
    config = model.config.text_config

    def static_cache():
        cache = StaticCache(config=config, max_cache_len=batch["input_ids"].shape[1] + 3)
        if laid_out:
            cache.early_initialization(4, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
        return cache

    expected = model(**batch, past_key_values=static_cache())
    graphs = compile_layers(model)
    assert_same(model(**batch, past_key_values=static_cache()), expected)
    assert bool(graphs) == laid_out  # else its tensors would have no fixed address


def test_generate_with_compiled_layers_gives_the_same_tokens():
    model = tiny_aligner("llama")
    batch = batch_of(model, [4, 0, 9, 1])
    settings = {**GREEDY, "max_new_tokens": 6, "min_new_tokens": 6}
    expected = model.generate(**batch, **settings)
    graphs = compile_layers(model)
    assert torch.equal(model.generate(**batch, **settings).sequences, expected.sequences)
    assert graphs


@torch.no_grad()
def test_a_copy_of_a_compiled_model_runs_its_own_weights():
    model, other = tiny_aligner("llama", seed=1), tiny_aligner("llama", seed=2)
    batch = batch_of(model, [4, 0, 9, 1])
    compile_layers(model)
    model_copy = copy.deepcopy(model)
    model_copy.load_state_dict(other.state_dict())
    assert_same(model_copy(**batch), other(**batch))


@torch.no_grad()
def test_a_whole_model_compiled_reads_slots_with_breaks_and_to_the_same_end():
    model = tiny_aligner("llama")
    batch = batch_of(model, [4, 0, 9, 1])
    expected = model(**batch)
    assert_same(torch.compile(model, backend="eager")(**batch), expected)


@torch.no_grad()
@torch._inductor.config.patch({"cpp.simdlen": 0, "compile_threads": 1})  # what compiles fastest
@pytest.mark.slow
def test_inductor_refines_as_uncompiled_layers_do():
    model = tiny_aligner(backbone_config("llama", num_hidden_layers=2), dtype=torch.float32, max_refinement_steps=1)
    batch = batch_of(model, [4, 0, 9, 1])
    expected = model(**batch)
    assert expected.recursion_depth.max() > 0
    compile_layers(model, backend="inductor")
    assert_same(model(**batch), expected, rtol=1e-4, atol=1e-4)
