"""The shipped aligner in float32, and questions about its passages, with which engines are compared."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.answering_arcaligner import PassageCopyLogitsProcessor
from arcaligner.apps.server.vllm_engine import IN_VLLM, copy_field, find_vllm, slots_request
from arcaligner.common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, read_json_lines
from arcaligner.configuration_arcaligner import DEFAULT_BASE_MODEL
from arcaligner.loading_arcaligner import models_directory

RATES, SIZES, ALIGNMENTS, NEW_TOKENS = (2, 4, "segment"), (1, 5, 20), ("start", "end"), 16
LENGTH = 4096  # of vLLM's context


class Reference:
    """The requests and answers of questions. All files are in one `folder`."""

    def __init__(self, folder: Path):
        self.model = ArcAlignerForCausalLM.from_pretrained(DEFAULT_CHECKPOINT, dtype=torch.float32).eval()
        self.processor = ArcAlignerProcessor.from_pretrained(DEFAULT_CHECKPOINT)
        self.rows = list(read_json_lines(SQUAD_SAMPLE))
        self.folder, self.end = folder, self.model.generation_config.eos_token_id
        self.base_model = models_directory() / DEFAULT_BASE_MODEL

    def cache(self, **settings):
        return self.model.passage_cache(self.processor, folder=self.folder, **settings)

    def draw(self, number: int) -> tuple[str, list, int | str]:
        """A question, its passages (if several, the first one twice), and a rate."""
        size, rate = SIZES[number % 3], RATES[number // 3 % 3]
        row, draws = self.rows[number % len(self.rows)], random.Random(number)
        others = [other["passages"][0] for other in draws.sample(self.rows, size)]
        passages = [*row["passages"], *others][:size]
        if size > 1:
            passages[-1] = passages[0]
        return row["question"], passages, rate

    def alignment(self, number: int) -> str:
        """Where the independent passages of a question are."""
        return ALIGNMENTS[number % 2]

    @torch.no_grad()
    def ask(self, cache, number: int, bonus: float = 0.0, **options) -> tuple[dict, list[int], torch.Tensor]:
        """The request of a question, its greedy ids in PyTorch, and the log-probabilities of the first token."""
        question, passages, rate = self.draw(number)
        self.model.config.passage_alignment = self.alignment(number)
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": self.end} | options
        (files,) = cache.prefix_files(question, passages, tokens_per_slot=rate)
        inputs = cache.prepare(question, documents=passages, tokens_per_slot=rate)
        length = inputs["input_ids"].shape[1]
        copies = PassageCopyLogitsProcessor(self.processor, [passages], bonus, self.end)
        output = self.model.generate(
            **inputs,
            **options,
            do_sample=False,
            logits_processor=LogitsProcessorList([copies]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        first = output.logits[0][0].log_softmax(-1)
        ends = [] if options["eos_token_id"] is None else [self.end]
        request = slots_request(files) | {"max_tokens": options["max_new_tokens"], "stop_token_ids": ends}
        request["sampling"] = {} if ends else {"ignore_eos": True}
        if bonus:
            request["kv_transfer_params"]["copy"] = copy_field(self.processor, passages, bonus, [self.end])
        return request, output.sequences[0, length:].tolist(), first


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("passages"))


@pytest.fixture(scope="session")
def run_vllm(tmp_path_factory, reference):
    """Sends rounds of requests to vLLM, each round in one batch; `options` are those of its `LLM`."""

    def run(rounds: list[list[dict]], **options) -> list[list[dict]]:
        options = {"dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 8} | options
        job = {"model": str(reference.base_model), "options": options, "rounds": rounds}
        folder = tmp_path_factory.mktemp("vllm")
        (folder / "requests.json").write_text(json.dumps(job))
        paths = [Path(__file__).parent / "run_in_vllm.py", folder / "requests.json", folder / "answers.json"]
        variables = {"PYTHONPATH": str(IN_VLLM), "ARCALIGNER_PASSAGES": str(reference.folder)}
        command = [find_vllm(), *map(str, paths)]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        run.log, results = done.stdout + done.stderr, json.loads((folder / "answers.json").read_text())
        run.preemptions = results["preemptions"]
        return results["rounds"]

    return run
