"""Work by formula: what a counter counts, the shortest times it allows, and who has more of it."""

import pytest
import torch
from training_rows import question_rows

from arcaligner.benchmarks.arms import make_arms
from arcaligner.benchmarks.costs import Sizes, Work, flop_counter, work_of_arms
from arcaligner.benchmarks.models import load_models
from arcaligner.benchmarks.prompts import both_prompts, pick_rows


@pytest.fixture(scope="module")
def models(checkpoint_dir):
    return load_models(str(checkpoint_dir), torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompts(processor):
    rows = pick_rows(question_rows(6), processor, k=3, batch_size=1)
    segments = [processor.segment_documents(row["passages"]) for row in rows]
    texts = [processor.encoder_texts(own, row["passages"]) for own, row in zip(segments, rows, strict=True)]
    embeds = [processor.encode_segments(own) for own in texts]
    return both_prompts(processor, rows, embeds, vocab_size=len(processor.tokenizer))


@pytest.fixture(scope="module")
def measured(models, prompts):
    """Operations counted, and work by formula."""
    arms, _ = make_arms(*models, *prompts)
    counted, depths = {}, {}
    for name, arm in arms.items():
        with torch.no_grad(), arm.state(), flop_counter() as counter:
            depths[name] = arm.run().recursion_depth
        counted[name] = counter.get_total_flops()
    return counted, work_of_arms(Sizes.of(*models), *prompts, depths)


def test_operations_of_the_text_are_those_counted_but_for_the_causal_half(models, prompts, measured):
    counted, work = measured
    sizes, n = Sizes.of(*models), prompts[0].whole.lengths[0]
    masked = sizes.layers * 2 * sizes.attention * n * n
    assert counted["standard_rag"] == work["standard_rag"].flops + masked
    new = prompts[0].tail.lengths[0]
    masked = sizes.layers * 2 * sizes.attention * new * new
    assert counted["standard_rag_cached"] == work["standard_rag_cached"].flops + masked


def test_operations_of_the_slots_are_those_counted_but_for_projector_and_mask(models, prompts, measured):
    counted, work = measured
    sizes, n = Sizes.of(*models), prompts[1].whole.lengths[0]
    slots = prompts[1].context_embeds.shape[1]
    projector = 2 * slots * sum(p.numel() for p in models[0].model.projector.parameters() if p.dim() == 2)
    masked = sizes.layers * 2 * sizes.attention * n * n
    assert counted["off"] == work["off"].flops + masked + projector


def test_operations_of_refinement_are_those_counted_but_for_unused_queries(models, prompts, measured):
    counted, work = measured
    sizes = Sizes.of(*models)
    text = prompts[1].prefix.lengths[0] - prompts[1].context_embeds.shape[1]
    queries = 2 * sizes.hidden * sizes.attention * text * (sizes.layers - 1)
    assert counted["always"] - counted["off"] == work["always"].flops - work["off"].flops + queries


def test_plain_refinement_is_counted_with_its_gates_on_all_rows(models, prompts, measured):
    counted, work = measured
    sizes, n = Sizes.of(*models), prompts[1].whole.lengths[0]
    gate = models[0].model.backbone.layers[0].slot_gate
    gates = 2 * n * (gate.up.weight.numel() + gate.out.weight.numel())
    masked = 2 * sizes.attention * n * n
    passes = sizes.steps * sizes.layers
    added = work["plain"].flops - work["off"].flops
    assert counted["plain"] - counted["off"] == added + passes * (gates + masked)


def test_less_is_computed_the_more_was_made_before(measured):
    for each in (measured[0], {name: work.flops for name, work in measured[1].items()}):
        assert each["slots_cached"] < each["off"] < each["adaptive"] < each["always"] < each["plain"]
        assert each["standard_rag_cached"] < each["standard_rag"] and each["off"] < each["standard_rag"]


def test_rows_of_a_batch_add_up_and_weights_are_read_once(models):
    sizes = Sizes.of(*models)
    both, first, second = sizes.reading([7, 9], [2, 0]), sizes.reading([7], [2]), sizes.reading([9], [0])
    weights = sizes.itemsize * (sizes.layers * sizes.weights + sizes.head)
    assert both.flops == first.flops + second.flops
    assert both.bytes == first.bytes + second.bytes - weights


def test_a_step_reads_its_layer_again_however_many_slots_take_it(models):
    sizes = Sizes.of(*models)
    one = torch.tensor([[[1, 0, 0], [0, 0, 0], [0, 0, 0]]])
    more = torch.tensor([[[1, 1, 1], [0, 0, 0], [0, 0, 0]], [[1, 1, -1], [0, 0, -1], [0, 0, -1]]])
    layer = sizes.weights * sizes.itemsize + sizes.lora * sizes.lora_itemsize
    assert sizes.refinement(one, [4]).bytes == sizes.refinement(more, [4, 4]).bytes == layer
    assert sizes.refinement(torch.tensor([[[2, 0, 0], [0, 1, 0], [0, 0, 0]]]), [4]).bytes == 3 * layer
    assert sizes.refinement(more, [4, 4]).flops == pytest.approx(
        5 * 2 * (sizes.weights + sizes.lora)
        + 4 * sizes.attention * (3 * (4 + 3) + 2 * (4 + 2))
        + 2 * 2 * sizes.hidden * sizes.keys_values * 4
    )


def test_a_step_of_some_slots_makes_keys_and_values_of_the_closed_ones(models):
    sizes = Sizes.of(*models)
    depth = torch.tensor([[[2, 0, 0], [0, 0, 0]]])
    each = 2 * (sizes.weights + sizes.lora) + 4 * sizes.attention * (4 + 3)
    assert sizes.refinement(depth, [4]).flops == 2 * each + 2 * sizes.hidden * sizes.keys_values * (4 + 2)


def test_the_limit_is_the_slower_of_operations_and_memory():
    peaks = {"flops_per_second": 10.0, "bytes_per_second": 5.0}
    assert Work(flops=100, bytes=20).limit(peaks) == 10.0
    assert (Work(flops=10, bytes=20) + Work(bytes=5)).limit(peaks) == 5.0
