"""The benchmark of cached passages: what each arm reads, new combinations in each round, files from the disk."""

import json

import pytest
import torch
from conftest import processor_with
from tiny_models import random_head
from training_rows import article_rows, write_rows

from arcaligner.answering_arcaligner import Answerer
from arcaligner.attention_arcaligner import CACHE
from arcaligner.benchmarks.arms import load_models, select_rows
from arcaligner.benchmarks.cached_passages import CachedPassages, main
from arcaligner.evaluation.answering import independent_inputs, independent_text, slot_inputs, text_inputs
from arcaligner.kv_cache_arcaligner import cache_of
from arcaligner.train.prompts import full_text

COMPRESSIONS = [2, "segment"]


@pytest.fixture(scope="module", params=["start", "end"])
def models(checkpoint_dir, request):
    settings = {"passage_attention": "separate", "passage_alignment": request.param}
    return load_models(str(checkpoint_dir), torch.float64, "cpu", **settings)


@pytest.fixture(scope="module")
def independent(processor, models):
    random_head(models[0])
    return processor_with(processor, passage_attention="separate")


@pytest.fixture(scope="module")
def known(models, independent, tmp_path_factory):
    return CachedPassages(
        models,
        independent,
        select_rows(article_rows(6), independent, 6),
        COMPRESSIONS,
        tmp_path_factory.mktemp("cached"),
    )


def assert_same_reading(outputs, expected):
    """Asserts that the first token and the whole cache are equal, except for rounding."""
    assert torch.equal(outputs.logits[:, -1].argmax(dim=-1), expected.logits[:, -1].argmax(dim=-1))
    for layer, other in zip(cache_of(outputs).layers, cache_of(expected).layers, strict=True):
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(layer, name), getattr(other, name), rtol=0, atol=1e-6)


@torch.no_grad()
def test_text_reader_caches(known, models, independent):
    """Text is read without a cache, after the same passages, and after cached ones."""
    base, row = models[1], known.draw(3, 1)
    second = row | {"question": "And when?"}
    for name, arm_row in (("text", row), ("text_same_set", second)):  # the second asks about the passages of the first
        whole = text_inputs(independent, [full_text(arm_row)])
        assert_same_reading(known.arms[name](arm_row), base(whole["input_ids"], use_cache=True))
    inputs = independent_inputs(base, [independent_text(independent, second)])
    last = {name: inputs[name][:, -1:] for name in ("input_ids", "position_ids")}
    expected = base(**last, **{CACHE: inputs[CACHE]})
    for name in ("text_apart", "text_apart_folder"):
        assert_same_reading(known.arms[name](second), expected)


@torch.no_grad()
def test_cached_slots_match_the_prompt(known, models, independent):
    """Cached slots give the logits of the whole prompt, and of the top-ranked passage."""
    row = known.draw(4, 7)
    for tokens_per_slot in COMPRESSIONS:
        expected = models[0](**slot_inputs(independent, [row], tokens_per_slot=tokens_per_slot), use_cache=True)
        for end in ("", "_folder"):
            assert_same_reading(known.arms[f"slots_x{tokens_per_slot}{end}"](row), expected)
    (best,) = Answerer(models[0], independent).select([row["question"]], [row["passages"]], 1)[0].numbers
    alone = slot_inputs(independent, [row | {"passages": row["passages"][best : best + 1]}])
    assert_same_reading(known.arms["slots_xsegment_top_ranked"](row), models[0](**alone, use_cache=True))


def test_known_passages_stay_cached(known):
    """Cached passages are never computed again, and folders are read each time."""
    stores = {name: arm.args[0] for name, arm in known.arms.items() if name.startswith("slots")}
    before = {name: (store.misses, store.loads) for name, store in stores.items()}
    report = known.measure(3, seconds=0.0)
    for name, store in stores.items():
        loads = 4 * 3 if name.endswith("_folder") else 0  # a round to warm up, and three
        assert (store.misses, store.loads) == (before[name][0], before[name][1] + loads)
    assert report["k"] == report["rounds"] == 3 and list(report["arms"]) == list(known.arms)
    assert report["arms"]["text"]["speed_up"]["median"] == 1.0
    drawn = [known.draw(3, number) for number in range(5)]  # another combination each round, the same in each run
    assert drawn == [known.draw(3, number) for number in range(5)]
    sets = [tuple(passage["text"] for passage in row["passages"]) for row in drawn]
    assert len(set(sets)) == 5 and all(len(set(texts)) == 3 for texts in sets)


def test_cached_bytes_match_the_file(known):
    """The cached bytes of a passage are those of its file."""
    for name, folder in known.folders.items():
        files = sorted(path.stat().st_size for path in folder.glob("*.safetensors"))
        passages = files[-len(known.rows) :]  # a store has one more entry, the text before the passages
        num_bytes = known.cached_bytes[name.removesuffix("_folder")] * len(known.rows)
        assert num_bytes < sum(passages) < num_bytes + 8000 * len(passages)  # with their fingerprints
    assert known.cached_bytes["text_apart"] > known.cached_bytes["slots_x2"] > known.cached_bytes["slots_xsegment"]


def test_command_writes_a_report(tmp_path, checkpoint_dir, capsys):
    """The command writes a report and prints its table."""
    data = tmp_path / "rows.jsonl"
    write_rows(data, article_rows(6, questions=1))
    options = {"sizes": "1,2", "tokens_per_slot": "4,segment", "dtype": "float32", "device": "cpu", "data": data}
    main(tmp_path / "out", str(checkpoint_dir), seconds=0.0, **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept.json"]
    report = json.loads((tmp_path / "out" / "kept.json").read_text("utf-8"))
    assert [size["k"] for size in report["sizes"]] == [1, 2] and report["known_passages"] == 6
    assert "| **slots**, cached: one slot per segment, from disk |" in capsys.readouterr().out
