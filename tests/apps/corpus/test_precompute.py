"""Precomputed passages of a corpus: questions use them without computing them, and outdated ones are replaced."""

import re
import threading
from unittest.mock import Mock

import pytest
import torch
from conftest import pipeline_of, processor_with, random_aligner
from safetensors import SafetensorError
from tiny_models import random_head

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.apps.corpus import precompute
from arcaligner.apps.corpus.build import build_corpus
from arcaligner.apps.corpus.precompute import precompute_corpus
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.server.engine import Engine
from arcaligner.apps.server.request import Request
from arcaligner.common.files import counted


@pytest.fixture(scope="module")
def independent_dir(tmp_path_factory, base_model_dir, processor):
    """A checkpoint of independent passages that estimates answerability and can abstain."""
    folder = tmp_path_factory.mktemp("independent")
    model = random_aligner(base_model_dir, processor, seed=2, passage_attention="separate")
    random_head(model)
    model.save_pretrained(folder)
    separate = processor_with(processor, passage_attention="separate", no_answer="not in the text")
    separate.save_pretrained(folder)
    return folder


@pytest.fixture
def independent(independent_dir):
    reader = ArcAlignerProcessor.from_pretrained(independent_dir)
    reader.encoder.device = "cpu"
    return ArcAlignerForCausalLM.from_pretrained(str(independent_dir)).eval(), reader


def files(corpus):
    return {path.name: path.stat().st_ino for path in corpus.precomputed_folder.iterdir()}


def test_corpus_uses_precomputed_passages(corpus, independent, monkeypatch):
    """A question computes no passage of a corpus that was precomputed."""
    model, reader = independent
    ask, answers = pipeline_of(model, reader), []
    for is_ahead in (False, True):
        if is_ahead:
            assert (
                precompute_corpus(corpus, model, reader) == "4 passages computed, 0 already computed"
                and len(files(corpus)) == 5
            )
            monkeypatch.setattr("arcaligner.kv_cache_arcaligner.read_text", None)
        engine = Engine(ask, Retriever(corpus, reader), max_passages=3)
        for question, top_k in (("Who wrote it?", 3), ("Since when?", 2)):
            chat = [{"role": "user", "content": question}]
            answer = engine.submit(Request(chat, top_k=top_k, max_new_tokens=9)).result()
            answers.append((answer.text, [source["text"] for source in answer.sources]))
            assert answer.num_cached == len(answer.sources) or not is_ahead
        if is_ahead:
            assert engine.store.misses == 0
            other_chat = [{"role": "user", "content": "Who?"}]
            engine.submit(Request(other_chat, documents=["Nobody has read this."], max_new_tokens=2)).result()
            assert engine.store.misses == 1 and len(files(corpus)) == 5
        engine.close()
    assert answers[:2] == answers[2:]


def test_killed_precomputation_continues(corpus, letters, independent, monkeypatch):
    """A killed run continues, and only what has changed is computed again."""
    monkeypatch.setattr(precompute, "BATCH_PASSAGES", 1)
    model, reader = independent

    def stop(done):
        if done.startswith("3 passages computed"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        precompute_corpus(corpus, model, reader, stop)
    first, messages = files(corpus), []
    report = precompute_corpus(corpus, model, reader, messages.append)
    assert report == messages[-1] == "1 passage computed, 3 already computed"
    assert first.items() < (before := files(corpus)).items()
    (letters / "old" / "ski.md").write_text("# Zhaparov\n\nHe jumps no more.", encoding="utf-8")
    build_corpus([str(letters)], corpus, reader)
    assert precompute_corpus(corpus, model, reader) == "1 passage computed, 3 already computed, 1 outdated file removed"
    assert len(before.items() & files(corpus).items()) == 4  # the text before the slots, and three passages
    with torch.no_grad():
        model.model.projector.out.bias.add_(1.0)
    assert (
        precompute_corpus(corpus, model, reader) == "4 passages computed, 0 already computed, 5 outdated files removed"
    )


@pytest.mark.parametrize(("dtype", "width"), [(None, 4), ("bfloat16", 2), ("auto", 2)])
def test_commands_use_their_precision(run_cli, corpus, independent_dir, monkeypatch, dtype, width):
    """A command uses precomputed passages only in the precision in which they were computed."""
    device = torch.accelerator.current_accelerator(check_available=True)
    fastest = {"cpu" if device is None else device.type: torch.bfloat16}
    monkeypatch.setattr("arcaligner.encoder_arcaligner.fastest_dtype", fastest.__getitem__)
    aligner = ("--corpus", corpus.path, "--checkpoint", independent_dir)
    code, out, err = run_cli("corpus", "precompute", *aligner, *(("--dtype", dtype) if dtype else ()))
    assert code == 0 and out == "4 passages computed, 0 already computed\n"
    num_bytes = corpus.info()["slots"] * 3 * 2 * 2 * 8 * width  # layers, keys and values, heads, head_dim
    size = f"{num_bytes / 1e6:.1f} MB on disk: {corpus.info()['slots']} slots of 0.{width} KB"
    assert size in err.replace("\n", " ")
    # The rest: headers, and the text before the slots.
    assert num_bytes < corpus.info()["precomputed_bytes"] < num_bytes + 24000
    ask = ("ask", "Who?", *aligner, "--top-k", 2, "--max-passages", 2, "--max-new-tokens", 2)
    for options, value_bytes in ((("--dtype", "bfloat16"), 2), (("--dtype", "float32"), 4), ((), 4)):
        code, _, err = run_cli(*ask, *options)
        num_cached = 2 if value_bytes == width else 0
        assert code == 0 and f"{num_cached} of 2 passages cached" in re.sub(r"\s+", " ", err)
    assert run_cli(*ask, "--dtype", "int8")[0] != 0


def test_command_precomputes_or_refuses(run_cli, corpus, independent_dir):
    """The command ends its thread before it exits: Python aborts with code 134 if a thread still computes."""
    before = set(threading.enumerate())
    ask = ("ask", "Who?", "--corpus", corpus.path, "--checkpoint", independent_dir, "--top-k", 3, "--max-new-tokens", 2)
    for options, num_used in (("", 1), ("--max-passages 2", 2), ("--max-passages 9", 3), ("--min-confidence 1", 1)):
        code, out, err = run_cli(*ask, *options.split())
        err = re.sub(r"\s+", " ", err)
        assert code == 0 and len(re.findall(r":\d+-\d+", out)) == num_used
        assert f"0 of {counted(num_used, 'passage')} cached" in err
        assert (f"Retrieved but not used: {counted(3 - num_used, 'passage')}" in err) == (num_used < 3)
        is_refused = "--min-confidence" in options
        assert out.startswith("not in the text\n") == is_refused == ("word for word" not in err)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "arcaligner-engine"]


def test_precompute_errors_are_reported(run_cli, corpus, independent, checkpoint_dir, monkeypatch):
    code, out, err = run_cli("corpus", "precompute", "--corpus", corpus.path, "--checkpoint", checkpoint_dir)
    assert code == 1 and out == "" and "`passage_attention`" in err
    with corpus.writing(), pytest.raises(ValueError, match="Another process is writing"):
        precompute_corpus(corpus, *independent)
    assert not corpus.precomputed_folder.exists()
    code, _, err = run_cli("corpus", "read", "--corpus", corpus.path, "--checkpoint", checkpoint_dir)
    assert code == 1 and "use `corpus precompute`" in err and "`passage_attention`" in err
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.save_file", full)
    with pytest.raises(OSError, match="could not be written.*free disk space, and run the command again"):
        precompute_corpus(corpus, *independent)
