"""COCOM's released checkpoints, run by their own code.

They read with their own Mistral-7B and their own prompt, so this is no comparison with an equal backbone.
"""

import math

import torch
from accelerate import load_checkpoint_in_model
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..train.corpora import Row
from ..train.data import passages_text
from .answering import MAX_NEW_TOKENS, Answer, Answerer, MissingMethodError, count_tokens, downloaded

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"
COCOM = "naver/cocom-v1-{}-mistral-7b"  # with the rate


class CocomAnswerer:
    """A `model` with `generate_from_text` and `decoder_tokenizer`, which makes one embedding per `rate` tokens."""

    def __init__(self, model, rate: int):
        self.model, self.rate = model, rate

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [self._answer(row) for row in rows]  # a call of several rows needs as many passages in each

    def _answer(self, row: Row) -> Answer:
        context = [passages_text({"passages": [passage]}) for passage in row["passages"]] or [""]
        (text,) = self.model.generate_from_text([context], [row["question"]], max_new_tokens=MAX_NEW_TOKENS)
        lengths = count_tokens(self.model.decoder_tokenizer, context)
        return Answer(text.strip(), [], sum(math.ceil(length / self.rate) for length in lengths), sum(lengths))


def load_cocom(checkpoints, rate: int) -> Answerer:
    """Loads COCOM at a rate."""
    folder = downloaded(COCOM.format(rate), "14.6 GB, CC BY-NC")
    downloaded(MISTRAL, "14.5 GB, Apache-2.0")
    if torch.device(checkpoints.device).type != "cuda":
        raise MissingMethodError("COCOM's own code runs only on a CUDA device; name one with `--device cuda`")
    return CocomAnswerer(load_cocom_model(folder).to(checkpoints.device), rate)


def load_cocom_model(folder: str):
    """The model of a COCOM checkpoint; `MissingMethodError` if its code needs a package that is missing."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        # Not by `from_pretrained`: the model loads its decoder while it is made, which transformers 5 forbids there.
        model = get_class_from_dynamic_module(config.auto_map["AutoModel"], folder)(config)
    except ImportError as error:
        raise MissingMethodError(f"COCOM's own code needs a package that is not installed: {error}") from error
    load_checkpoint_in_model(model, folder)
    return model.to(config.dtype).eval()
