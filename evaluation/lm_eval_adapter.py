"""An aligner as a model of lm-evaluation-harness, with the question sets of this project as tasks.

    python -m arcaligner.evaluation.lm_eval_adapter --model_args pretrained=CHECKPOINT --tasks arcaligner_squad

This is the command line of `lm_eval` with `--model arcaligner` and the tasks of `lm_eval_tasks`. In Python,
importing this module registers the model.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from ..answering_arcaligner import MAX_NEW_TOKENS
from ..common.rows import Row
from .answering import answer_slots, in_batches, load_aligner

TASKS_DIRECTORY = Path(__file__).parent / "lm_eval_tasks"
DECODING = {"do_sample": False, "max_gen_toks": MAX_NEW_TOKENS, "until": []}


@register_model("arcaligner")
class ArcAlignerLM(LM):
    """
    Answers prompts that are JSON objects with a question and documents.

    Args:
        pretrained (`str`): An aligner's folder or Hub id.
        batch_size (`int`): Questions per batch.
        device (`str`, *optional*): The device that the model runs on. Default: a CUDA device if there is one.
    """

    def __init__(self, pretrained: str, batch_size: int | str = 1, device: str | None = None):
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"`batch_size` is {batch_size}; expected a number of questions of at least 1, such as 16.")
        self.batch_size = int(batch_size)
        self.aligner = load_aligner(pretrained, device or default_device())

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """An answer to each request, whose arguments are a prompt and decoding settings."""
        for request in requests:
            if request.args[1] != DECODING:
                raise ValueError(
                    f"The generation settings are {request.args[1]}, but the aligner answers as in `arcaligner "
                    f"evaluate`, with {DECODING}. Leave out `--gen_kwargs`, and choose a task of "
                    f"evaluation/{TASKS_DIRECTORY.name}."
                )
        rows = [{"number": number, **parse_prompt(request.args[0])} for number, request in enumerate(requests)]
        answers = [""] * len(rows)

        def answer_batch(batch: list[Row]) -> None:
            for row, answer in zip(batch, answer_slots(*self.aligner, batch), strict=True):
                answers[row["number"]] = answer.text
                self.cache_hook.add_partial("generate_until", requests[row["number"]].args, answer.text)

        in_batches(rows, self.batch_size, answer_batch, "Answering")
        return answers

    def loglikelihood(self, requests: list[Instance]):
        raise ValueError(_ANSWERS_ONLY)

    loglikelihood_rolling = loglikelihood


_ANSWERS_ONLY = (
    "The aligner answers questions about documents (`output_type: generate_until`) and computes no likelihoods. To "
    "evaluate a base model alone, without documents, run `lm_eval --model hf --model_args pretrained=BASE_MODEL`."
)


def parse_prompt(prompt: str) -> Row:
    """Question and passages of a prompt."""
    try:
        request = json.loads(prompt)
        return {"question": request["question"], "passages": request["documents"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'The prompt is {prompt[:80]!r}; expected JSON, {{"question": str, "documents": [{{"title", "text"}}]}}, '
            f"which the tasks in evaluation/{TASKS_DIRECTORY.name} write. Choose one of these tasks. {_ANSWERS_ONLY}"
        ) from error


def default_device() -> str:
    """The device of a model if the user names none. The harness would assume `cuda:0` on every machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """The command line of `lm_eval`; arguments of the user override the defaults set here."""
    defaults = {"--model": "arcaligner", "--include_path": str(TASKS_DIRECTORY), "--device": default_device()}
    sys.argv[1:] = ["run", *itertools.chain(*defaults.items()), *sys.argv[1:]]
    cli_evaluate()


if __name__ == "__main__":
    main()
