"""Objects that are created on first use are created once, even if several threads use them first."""

import functools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from conftest import pipeline_of
from peft.tuners.lora import Linear

from arcaligner.encoder_arcaligner import SentenceEncoder

TEXTS = ["It was written by Ada.", "The riding was created in 1924 from parts of Parkdale. " * 12]


def at_once(calls: list) -> list:
    """The results of calls that threads start at the same time."""
    begin = Barrier(len(calls))

    def run(call):
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(run, call) for call in calls]]


@pytest.fixture(scope="module")
def trained_folder(encoder_dir, tmp_path_factory):
    """A random LoRA of the encoder, in the format of a checkpoint."""
    encoder, folder = SentenceEncoder(str(encoder_dir)), tmp_path_factory.mktemp("lora")
    encoder.device = "cpu"
    for weight in encoder.add_trainable_lora(2):
        torch.nn.init.normal_(weight, std=0.5)
    encoder.save(folder)
    return folder


def test_concurrent_first_calls_agree(encoder_dir, trained_folder, monkeypatch):
    """Each of eight first calls of a trained encoder sees all of its LoRA merged, and one encoder."""
    merge = Linear.merge

    def slow_merge(layer, *args, **kwargs):
        time.sleep(0.02)
        return merge(layer, *args, **kwargs)

    monkeypatch.setattr(Linear, "merge", slow_merge)
    encoder = SentenceEncoder(str(encoder_dir), str(trained_folder))
    encoder.device = "cpu"
    results = at_once([lambda: (encoder.encode(TEXTS), encoder.model, encoder.untrained, encoder.tokenizer)] * 8)
    expected = encoder.encode(TEXTS)
    for embeds, *others in results:
        torch.testing.assert_close(embeds, expected, rtol=0, atol=0)
        assert all(one is other for one, other in zip(others, results[0][1:], strict=True))


def test_counting_leaves_cut_texts_alone(encoder_dir, request):
    """One thread counts tokens of whole texts while others encode texts that are cut at the encoder's limit."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    encoder = SentenceEncoder(str(encoder_dir))
    encoder.device = "cpu"
    expected = encoder.encode(TEXTS)
    calls = [lambda: [encoder.num_parts(TEXTS[1]) for _ in range(200)], *[lambda: encoder.encode(TEXTS * 20)] * 7]
    for embeds in at_once(calls)[1:]:
        torch.testing.assert_close(embeds, expected.repeat(20, 1))


def test_a_pipeline_has_one_cache(separate, monkeypatch):
    """Threads that use the pipeline first share one passage cache."""
    ask = pipeline_of(*separate)
    new_cache = ask.model.passage_cache

    def slow_cache(*args, **kwargs):
        time.sleep(0.02)
        return new_cache(*args, **kwargs)

    monkeypatch.setattr(ask.model, "passage_cache", slow_cache)
    caches = at_once([lambda: ask.answerer.cache] * 8)
    assert len({id(cache) for cache in caches}) == 1
