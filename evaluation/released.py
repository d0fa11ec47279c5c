"""Checkpoints that others released, run by their own code: COCOM and xRAG.

They read with their own Mistral-7B and their own prompts, so they are not a comparison with an equal backbone.
"""

import math

import torch
from accelerate import load_checkpoint_in_model
from transformers import AutoConfig, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..train.corpora import Row
from ..train.data import passages_text
from .answering import MAX_NEW_TOKENS, Answer, Answerer, MissingMethodError, count_tokens, downloaded

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"
COCOM = "naver/cocom-v1-{}-mistral-7b"  # with the rate
XRAG_MODEL, XRAG_RETRIEVER = "Hannibal046/xrag-7b", "Salesforce/SFR-Embedding-Mistral"
XRAG_TOKEN = "<xRAG>"
XRAG_PROMPT = (
    "[INST] Refer to the background document and answer the questions:\n\n"
    "Background: {slots}\n\nQuestion: {question} [/INST] The answer is:"
)
XRAG_MAX_LENGTH = 180  # tokens of a passage that its encoder reads


def passage_texts(row: Row) -> list[str]:
    """The text of each passage; one empty text for a row without passages."""
    return [passages_text({"passages": [passage]}) for passage in row["passages"]] or [""]


class CocomAnswerer:
    """COCOM: a `model` with `generate_from_text` and `decoder_tokenizer`, one embedding per `rate` tokens."""

    def __init__(self, model, rate: int):
        self.model, self.rate = model, rate

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [self._answer(row) for row in rows]  # a call of several rows needs as many passages in each

    def _answer(self, row: Row) -> Answer:
        context = passage_texts(row)
        (text,) = self.model.generate_from_text([context], [row["question"]], max_new_tokens=MAX_NEW_TOKENS)
        lengths = count_tokens(self.model.decoder_tokenizer, context)
        return Answer(text.strip(), [], sum(math.ceil(length / self.rate) for length in lengths), sum(lengths))


def load_cocom(rate: int):
    """Loads COCOM at a rate."""

    def load(checkpoints) -> Answerer:
        folder = downloaded(COCOM.format(rate), "14.6 GB, CC BY-NC")
        downloaded(MISTRAL, "14.5 GB, Apache-2.0")
        if torch.device(checkpoints.device).type != "cuda":
            raise MissingMethodError("COCOM's own code runs on a CUDA device alone; name one with `--device cuda`")
        return CocomAnswerer(load_cocom_model(folder).to(checkpoints.device), rate)

    return load


def load_cocom_model(folder: str):
    """The model of a COCOM checkpoint; `MissingMethodError` if its code needs a package that is missing."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        # Not by `from_pretrained`: the model loads its decoder while it is made, which transformers 5 forbids there.
        model = get_class_from_dynamic_module(config.auto_map["AutoModel"], folder)(config)
    except ImportError as error:
        raise MissingMethodError(f"COCOM's own code asks for a package that is not installed: {error}") from error
    load_checkpoint_in_model(model, folder)
    return model.to(config.dtype).eval()


class XragAnswerer:
    """xRAG, one slot per passage: `XMistralForCausalLM` and `SFR` of its repository, with their tokenizers."""

    def __init__(self, model, tokenizer, retriever, retriever_tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.retriever, self.retriever_tokenizer = retriever, retriever_tokenizer

    @torch.inference_mode()
    def answer(self, rows: list[Row]) -> list[Answer]:
        passages = [passage_texts(row) for row in rows]
        prompts = [
            XRAG_PROMPT.format(slots=" ".join([XRAG_TOKEN] * len(texts)), question=row["question"])
            for row, texts in zip(rows, passages, strict=True)
        ]
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt").to(self.model.device)
        flat = [text for texts in passages for text in texts]
        cut = {"max_length": XRAG_MAX_LENGTH, "truncation": True}
        read = self.retriever_tokenizer(flat, padding=True, return_tensors="pt", **cut).to(self.retriever.device)
        embeds = self.retriever.get_doc_embedding(input_ids=read["input_ids"], attention_mask=read["attention_mask"])
        # From embeddings, `generate` returns the new tokens alone.
        output = self.model.generate(
            input_ids=inputs["input_ids"],  # (batch, seq_len)
            attention_mask=inputs["attention_mask"],
            retrieval_embeds=embeds.to(self.model.device),  # (num_passages, retriever_hidden_size)
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        texts = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        is_real = inputs["attention_mask"].bool()
        prompt_ids = [ids[real].tolist() for ids, real in zip(inputs["input_ids"], is_real, strict=True)]
        num_tokens = count_tokens(self.tokenizer, [passages_text(row) for row in rows])
        columns = zip(texts, prompt_ids, map(len, passages), num_tokens, strict=True)
        return [Answer(text.strip(), *rest) for text, *rest in columns]


def load_released_xrag(checkpoints) -> Answerer:
    """The released xRAG-7B."""
    weights = downloaded(XRAG_MODEL, "14.5 GB")
    encoder = downloaded(XRAG_RETRIEVER, "14.2 GB, CC BY-NC")
    try:
        from src.model import SFR, XMistralForCausalLM
    except ImportError as error:
        raise MissingMethodError(
            "xRAG's own code is not on the Python path; `git clone https://github.com/Hannibal046/xRAG` and put that "
            "folder into $PYTHONPATH"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(weights, add_eos_token=False, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token
    model = XMistralForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval().to(checkpoints.device)
    model.set_xrag_token_id(tokenizer.convert_tokens_to_ids(XRAG_TOKEN))
    retriever = SFR.from_pretrained(encoder, dtype=torch.bfloat16).eval().to(checkpoints.device)
    return XragAnswerer(model, tokenizer, retriever, AutoTokenizer.from_pretrained(encoder))
