"""What an unmodified vLLM answers from precomputed passages is what PyTorch does, and what does not fit is refused.

They need vLLM's environment (`make vllm`, or `ARCALIGNER_VLLM` names a Python that has it); those of
`test_vllm_files.py` do not.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import greedy_answer  # noqa: F401

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.apps.server.vllm_engine import IN_VLLM, find_vllm, slots_request
from arcaligner.common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, read_json_lines
from arcaligner.configuration_arcaligner import DEFAULT_BASE_MODEL
from arcaligner.loading_arcaligner import models_directory

VLLM = find_vllm()
pytestmark = [
    pytest.mark.default_backbone,
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="vLLM is not there: `make vllm`, or ARCALIGNER_VLLM=its Python"),
]
RATES, SIZES, NEW_TOKENS = (2, 4, "segment"), (1, 5, 20), 16
LENGTH = 4096


class Reference:
    """The shipped aligner in float32, and the requests and answers of questions about its passages."""

    def __init__(self, folder: Path):
        self.model = ArcAlignerForCausalLM.from_pretrained(DEFAULT_CHECKPOINT, dtype=torch.float32).eval()
        self.processor = ArcAlignerProcessor.from_pretrained(DEFAULT_CHECKPOINT)
        self.rows = list(read_json_lines(SQUAD_SAMPLE))
        self.folder, self.end = folder, self.model.generation_config.eos_token_id

    def cache(self, **settings):
        return self.model.passage_cache(self.processor, folder=self.folder, **settings)

    def draw(self, number: int) -> tuple[str, list, int | str]:
        """A question, its passages, of several one twice, and a rate."""
        size, rate = SIZES[number % 3], RATES[number // 3 % 3]
        row, draws = self.rows[number % len(self.rows)], random.Random(number)
        others = [each["passages"][0] for each in draws.sample(self.rows, size)]
        passages = [*row["passages"], *others][:size]
        if size > 1:
            passages[-1] = passages[0]
        return row["question"], passages, rate

    @torch.no_grad()
    def ask(self, cache, number: int) -> tuple[dict, list[int], torch.Tensor]:
        """The request of a question, its greedy ids in PyTorch, and the log-probabilities of the first token."""
        question, passages, rate = self.draw(number)
        (files,) = cache.prefix_files(question, passages, tokens_per_slot=rate)
        inputs = cache.prepare(question, documents=passages, tokens_per_slot=rate)
        length = inputs["input_ids"].shape[1]
        output = self.model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        first = output.logits[0][0].log_softmax(-1)
        request = slots_request(files) | {"max_tokens": NEW_TOKENS, "stop_token_ids": [self.end]}
        return request, output.sequences[0, length:].tolist(), first


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("passages"))


@pytest.fixture
def run_vllm(tmp_path, reference):
    """Asks vLLM rounds of requests, each in one batch; `options` are those of its `LLM`."""

    def run(rounds: list[list[dict]], **options) -> list[list[dict]]:
        options = {"dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 8} | options
        asked = {"model": str(models_directory() / DEFAULT_BASE_MODEL), "options": options, "rounds": rounds}
        (tmp_path / "requests.json").write_text(json.dumps(asked))
        paths = [Path(__file__).parent / "run_in_vllm.py", tmp_path / "requests.json", tmp_path / "answers.json"]
        own = {"PYTHONPATH": str(IN_VLLM), "ARCALIGNER_PASSAGES": str(reference.folder)}
        done = subprocess.run([VLLM, *map(str, paths)], env=os.environ | own, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        run.log = done.stdout + done.stderr
        return json.loads((tmp_path / "answers.json").read_text())

    return run


def differences(asked, answers) -> tuple[list[int], float]:
    """The numbers of questions with other ids, and the largest difference of first log-probabilities."""
    other, largest = [], 0.0
    for number, ((_, ids, first), answer) in enumerate(zip(asked, answers, strict=True)):
        if answer.get("ids") != ids:
            other.append(number)
        for id, found in answer["first"].items():
            largest = max(largest, abs(first[int(id)].item() - found))
    return other, largest


def test_answers_are_those_of_pytorch(reference, run_vllm):
    """A hundred questions about 1, 5 and 20 passages at three rates, some of which stand twice, prefix caching on:
    alone, then all at once, when the prefixes of the first time are found."""
    cache = reference.cache()
    asked = [reference.ask(cache, number) for number in range(100)]
    requests = [request for request, _, _ in asked]
    *alone, together = run_vllm([*[[each] for each in requests], requests])
    for answers in ([answer for (answer,) in alone], together):
        other, largest = differences(asked, answers)
        print(f"{len(asked) - len(other)} of {len(asked)} equal, first log-probabilities within {largest:.1e}")
        assert not other and largest < 1e-3
    assert all(answer["cached"] for answer in together)
