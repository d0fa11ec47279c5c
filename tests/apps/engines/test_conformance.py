"""One folder of precomputed passages, and three engines that answer about them as the aligner in PyTorch does.

A hundred questions about 1, 5 or 20 passages at three rates, one passage twice in each list of several, and no copying.
The passages of every second question end at the same position, those of the others begin there.

- `transformers`: the unmodified base model, which continues from the files.
- `vLLM`: unmodified, from the same files, prefix caching on: one at a time, and then all together, when the prefixes of
  the first time are found. Needs `make vllm`, or `ARCALIGNER_VLLM` names a Python that has it.
- `llama.cpp`: a GGUF file of the same weights in float32. It has no interface for keys and values, so it computes those
  of the passages from their slots.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from gguf_base_model import write_base_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from arcaligner.apps.engines.gguf_files import export_gguf
from arcaligner.apps.engines.llama_cpp import LlamaCppEngine
from arcaligner.apps.server.vllm_engine import find_vllm
from arcaligner.common.files import DEFAULT_CHECKPOINT
from arcaligner.kv_cache_arcaligner import join_keys_values

pytestmark = [pytest.mark.default_backbone, pytest.mark.slow, pytest.mark.load]
QUESTIONS, NEW_TOKENS, LIKELIEST = 100, 16, 8


class Answer(NamedTuple):
    text: str
    first: dict[int, float]  # log-probabilities of likely first tokens


@pytest.fixture(scope="module")
def expected(reference):
    """For each question, the request to vLLM, the text of the greedy answer, and the log-probabilities of its first
    token."""
    cache, answers = reference.cache(max_bytes=0), []
    for number in range(QUESTIONS):
        request, ids, first = reference.ask(cache, number)
        answers.append((request, text_of(reference, ids), first))
    return answers


def text_of(reference, ids: list[int]) -> str:
    return reference.processor.decode(ids, skip_special_tokens=True)


def likeliest(logits: torch.Tensor) -> dict[int, float]:
    values, ids = logits.float().log_softmax(-1).topk(LIKELIEST)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@torch.inference_mode()
def answers_of_transformers(reference, expected, folder, run_vllm) -> Iterator[list[Answer]]:
    backbone = AutoModelForCausalLM.from_pretrained(reference.base_model, dtype=torch.float32).eval()
    answers = []
    for number, (request, _, _) in enumerate(expected):
        slots = request["kv_transfer_params"]["slots"]
        parts = [load_file(reference.folder / f"{key}.safetensors")["keys_values"] for key, _ in slots]
        if reference.alignment(number) == "end":
            cache = join_keys_values([parts], backbone.config, "end")
        else:
            cache = DynamicCache(config=backbone.config)
            for layer, (keys, values) in enumerate(torch.cat(parts, dim=3)):
                cache.update(keys[None], values[None], layer)
        new, written, first = request["prompt"][sum(count for _, count in slots) :], [], {}
        position = slots[0][1] + max(count for _, count in slots[1:])  # independent passages share theirs
        while len(written) < NEW_TOKENS and reference.end not in written:
            positions = torch.arange(position, position + len(new))[None]
            logits = backbone(torch.tensor([new]), past_key_values=cache, position_ids=positions).logits[0, -1]
            first = first or likeliest(logits)
            position, new = position + len(new), [int(logits.argmax())]
            written += new
        answers.append(Answer(text_of(reference, written), first))
    yield answers


def answers_of_vllm(reference, expected, folder, run_vllm) -> Iterator[list[Answer]]:
    requests = [request for request, _, _ in expected]
    *alone, together = run_vllm([*[[request] for request in requests], requests])
    assert all(answer["cached"] for answer in together)
    for answers in ([answer for (answer,) in alone], together):
        yield [
            Answer(text_of(reference, answer["ids"]), {int(id): value for id, value in answer["first"].items()})
            for answer in answers
        ]


def answers_of_llama_cpp(reference, expected, folder, run_vllm) -> Iterator[list[Answer]]:
    base_model = AutoModelForCausalLM.from_pretrained(reference.base_model, dtype=torch.float32)
    tokens = reference.processor.tokenizer.convert_ids_to_tokens(range(base_model.config.vocab_size))
    write_base_model(base_model, tokens, folder / "base.gguf")
    export_gguf(str(DEFAULT_CHECKPOINT), folder / "exported")
    engine = LlamaCppEngine(folder / "exported", folder / "base.gguf", cache_type="f32")
    engine.processor.copy_bonus, answers = 0.0, []
    for number in range(QUESTIONS):
        question, passages, rate = reference.draw(number)
        engine.config.passage_alignment = reference.alignment(number)
        first = likeliest(torch.from_numpy(engine.prefill(question, passages, tokens_per_slot=rate)))
        answers.append(Answer(engine.answer(question, passages, NEW_TOKENS, tokens_per_slot=rate), first))
    yield answers


NO_VLLM = pytest.mark.skipif(find_vllm() is None, reason="no vLLM: `make vllm`, or ARCALIGNER_VLLM=its Python")
NO_LLAMA_CPP = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="no llama.cpp: `pip install -e '.[llama-cpp]'`"
)


@pytest.mark.parametrize(
    "answers_of",
    [
        pytest.param(answers_of_transformers, id="transformers"),
        pytest.param(answers_of_vllm, id="vLLM", marks=NO_VLLM),
        pytest.param(answers_of_llama_cpp, id="llama.cpp", marks=NO_LLAMA_CPP),
    ],
)
def test_engines_answer_alike(answers_of, reference, expected, tmp_path, run_vllm):
    for answers in answers_of(reference, expected, tmp_path, run_vllm):
        others, largest = [], 0.0
        for number, ((_, text, first), answer) in enumerate(zip(expected, answers, strict=True)):
            others += [] if answer.text == text else [(number, answer.text, text)]
            largest = max(largest, *(abs(first[id].item() - value) for id, value in answer.first.items()))
        print(f"{len(expected) - len(others)} of {len(expected)} equal, first within {largest:.1e}")
        assert not others and largest < 1e-3
