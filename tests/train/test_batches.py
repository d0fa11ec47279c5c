"""Batches with about equally many positions: their contents, their order, and runs that use them."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from training_recipes import logs, parameters, run, run_until
from training_rows import question_rows

from arcaligner.train import batches as module
from arcaligner.train.batches import ExamplesWithCompression, TokenBatches, drawn_tokens_per_slot, example_lengths
from arcaligner.train.examples import EXAMPLE_FEATURES, ExampleBuilder
from arcaligner.train.sft import AlignerTrainer, ContextCollator

RATES = [2, 2, 4, "segment"]
STEPS = {"max_steps": 6, "save_steps": 2, "tokens_per_slot": RATES, "max_questions": 2, "batch_tokens": 400}


def example(row_id, head, turns, segments):
    """An example with a head, turns and segments of these numbers of tokens."""
    words = [{"document": 0, "encoder_text": "", "encoder_start": 0, "word_ids": [1] * n} for n in segments]
    turns = [{"input_ids": [2] * n, "labels": [2] * n} for n in turns]
    return {
        "row_id": row_id,
        "head": [0] * head,
        "turns": turns,
        "segments": [segment | {"word_ends": segment["word_ids"]} for segment in words],
        "length": 0,
    }


def some_batches(num_examples=200, batch_tokens=900, num_batches=300, seed=3):
    draw = np.random.default_rng(1)
    lengths = {rate: draw.integers(20, 300, num_examples) // (1 + 3 * (rate == "segment")) for rate in {*RATES}}
    return lengths, TokenBatches(lengths, RATES, batch_tokens, num_batches, seed)


def test_lengths_count_head_slots_turns(monkeypatch):
    monkeypatch.setattr(module, "EXAMPLES_PER_BLOCK", 2)
    rows = [example("a", 3, [5, 2], [10, 3]), example("b", 1, [4], []), example("c", 0, [1], [7])]
    by_rate = example_lengths(Dataset.from_list(rows, features=EXAMPLE_FEATURES), [2, 4, "segment"])
    expected = {2: [10 + 5 + 2, 5, 1 + 4], 4: [10 + 3 + 1, 5, 1 + 2], "segment": [12, 5, 2]}
    assert {rate: lengths.tolist() for rate, lengths in by_rate.items()} == expected


def test_lengths_of_selected_examples():
    """After a shuffle and a cut a data set has indices in place of ordered rows; the lengths are those of its rows."""
    rows = [example(str(number), number, [1], [number]) for number in range(9)]
    chosen = Dataset.from_list(rows, features=EXAMPLE_FEATURES).select([7, 2, 5])
    assert example_lengths(chosen, ["segment"])["segment"].tolist() == [9, 4, 7]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(50, 200), st.integers(1, 40), st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_batches_never_exceed_their_tokens(sizes, batch_tokens, num_batches, seed):
    lengths = {2: np.array(sizes), "segment": np.array(sizes) // 2 + 1}
    batches = list(TokenBatches(lengths, [2, "segment"], batch_tokens, num_batches, seed))
    assert len(batches) == num_batches and all(batches)
    for batch in batches:
        (rate,) = {rate for _, rate in batch}
        assert len(batch) * max(lengths[rate][number] for number, _ in batch) <= batch_tokens


def test_batches_are_nearly_full():
    """Batches are nearly full at each rate, so they have more examples where slots are few."""
    lengths, batches = some_batches()
    filled, sizes = {rate: [] for rate in lengths}, {rate: [] for rate in lengths}
    for batch in batches:
        rate = batch[0][1]
        filled[rate].append(sum(lengths[rate][number] for number, _ in batch))
        sizes[rate].append(len(batch))
    assert all(np.mean(sums) > 0.8 * 900 for sums in filled.values())
    assert np.mean(sizes["segment"]) > 3 * np.mean(sizes[2])


def test_examples_take_equal_turns():
    """The numbers of times that examples, long or short, are used differ by at most 2."""
    _, batches = some_batches(num_batches=1200)
    counts = Counter(number for batch in batches for number, _ in batch)
    assert len(counts) == 200 and max(counts.values()) - min(counts.values()) <= 2


def test_rates_follow_their_shares():
    lengths, batches = some_batches(num_batches=4000)
    counts = Counter(batch[0][1] for batch in batches)
    # Eight batches of one rate form a pool.
    assert [counts[rate] / 4000 for rate in (2, 4, "segment")] == pytest.approx([0.5, 0.25, 0.25], abs=0.05)


def test_seed_decides_the_batches():
    once, again, other = (list(some_batches(seed=seed)[1]) for seed in (3, 3, 4))
    assert once == again != other


def test_longest_example_must_fit():
    with pytest.raises(ValueError, match="`batch_tokens` is 100, but the longest example has 120 positions"):
        TokenBatches({2: np.array([5, 120]), 4: np.array([3, 60])}, [2, 4], 100, 1, 0)


def test_examples_carry_their_rate():
    rated = ExamplesWithCompression(Dataset.from_list([{"row_id": "a"}, {"row_id": "b"}]))
    examples = rated.__getitems__([(1, 4), (0, 4)])
    assert examples == [{"row_id": "b", "tokens_per_slot": 4}, {"row_id": "a", "tokens_per_slot": 4}]
    assert drawn_tokens_per_slot(examples, [2]) == 4 and len(rated) == 2


def test_collated_batches_fit(processor):
    """The counted positions are those of the batch that the model gets."""
    builder = ExampleBuilder(processor, tokens_per_slot=(2, "segment"))
    examples = [example for row in question_rows(24) for example in builder.question_examples([row])]
    dataset = Dataset.from_list(examples, features=EXAMPLE_FEATURES)
    lengths, rates = example_lengths(dataset, [2, "segment"]), [2, "segment"]
    collate = ContextCollator(processor.context_token_id, 0, processor.encoder.text_tokenizer, rates)
    for batch in TokenBatches(lengths, rates, 300, 20, seed=1):
        collated = collate(ExamplesWithCompression(dataset).__getitems__(batch))
        longest = max(lengths[rate][number] for number, rate in batch)
        assert collated["input_ids"].shape == (len(batch), longest)


# Runs


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, write_recipe):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(write_recipe("grounding", folder, **STEPS))
    return folder


@pytest.mark.parametrize("step, checkpoint", [(3, "checkpoint-2"), (5, "checkpoint-4")])
def test_resumed_run_equals_uninterrupted(tmp_path, write_recipe, whole_run, step, checkpoint):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)
    run_until(step, arguments)
    run(arguments)
    torch.testing.assert_close(parameters(tmp_path / "run"), parameters(whole_run), rtol=0, atol=0)
    tokens = [[entry["num_tokens"] for entry in logs(folder, "num_tokens")] for folder in (tmp_path / "run", whole_run)]
    assert tokens[0] == tokens[1]


def test_finished_run_takes_no_step(whole_run, write_recipe, monkeypatch):
    monkeypatch.setattr(AlignerTrainer, "training_step", None)
    run(write_recipe("grounding", whole_run, **STEPS))
    assert json.loads((whole_run / "trainer_state.json").read_text())["global_step"] == 6


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"batch_tokens": 0}, "`batch_tokens` is 0; expected"),
        ({"batch_tokens": 400, "max_steps": -1}, "Set `max_steps`"),
        ({"batch_tokens": 400, "global_batch_size": 8}, "Leave one of the two out"),
    ],
)
def test_keys_that_do_not_fit(tmp_path, write_recipe, keys, message):
    with pytest.raises(ValueError, match=message):
        run(write_recipe("grounding", tmp_path / "run", **keys))


def test_several_processes_are_refused(tmp_path, write_recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Start one process, or leave `batch_tokens` out"):
        run(write_recipe("grounding", tmp_path / "run", **STEPS))
