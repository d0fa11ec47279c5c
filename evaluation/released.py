"""Checkpoints that others released, run by their own code: COCOM and xRAG.

They read with a Mistral-7B of their own and their own prompts, so they are no part of a comparison at equal backbone.
"""

import math

import torch
from accelerate import load_checkpoint_in_model
from transformers import AutoConfig, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from .answering import MAX_NEW_TOKENS, Row, passages_text
from .downloaded import downloaded
from .reading import Answer, MissingMethodError, Reader

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"
COCOM = "naver/cocom-v1-{}-mistral-7b"  # with the rate
XRAG_MODEL, XRAG_RETRIEVER = "Hannibal046/xrag-7b", "Salesforce/SFR-Embedding-Mistral"
XRAG_TOKEN = "<xRAG>"
XRAG_PROMPT = (
    "[INST] Refer to the background document and answer the questions:\n\n"
    "Background: {slots}\n\nQuestion: {question} [/INST] The answer is:"
)
XRAG_MAX_LENGTH = 180  # tokens of a passage that its encoder reads


class CocomReader:
    """
    COCOM answers.

    Args:
        model: With `generate_from_text(contexts, questions, max_new_tokens)` and `decoder_tokenizer`.
        rate (`int`): Tokens of a passage for one of its embeddings.
    """

    def __init__(self, model, rate: int):
        self.model, self.rate = model, rate

    def answer(self, rows: list[Row]) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(rows)
        for numbers in _by_passages(rows):  # one call takes as many passages for each question
            contexts = [_texts(rows[number]) for number in numbers]
            questions = [rows[number]["question"] for number in numbers]
            texts = self.model.generate_from_text(contexts, questions, max_new_tokens=MAX_NEW_TOKENS)
            for number, context, text in zip(numbers, contexts, texts, strict=True):
                lengths = _lengths(self.model.decoder_tokenizer, context)
                num_embeddings = sum(math.ceil(length / self.rate) for length in lengths)
                answers[number] = Answer(text.strip(), [], num_embeddings, sum(lengths))
        return answers


def load_cocom(rate: int):
    """COCOM, compressed `rate` times; its own code runs on a CUDA device alone."""

    def load(checkpoints) -> Reader:
        folder = downloaded(COCOM.format(rate), "14.6 GB, CC BY-NC")
        downloaded(MISTRAL, "14.5 GB, Apache-2.0")
        if torch.device(checkpoints.device).type != "cuda":
            raise MissingMethodError("COCOM's own code runs on a CUDA device alone; name one with `--device cuda`")
        return CocomReader(load_cocom_model(folder).to(checkpoints.device), rate)

    return load


def load_cocom_model(folder: str):
    """The model of a COCOM checkpoint.

    Raises:
        `MissingMethodError`: a package that its code asks for is missing, as flash-attn.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        # Not by `from_pretrained`: the model loads its decoder while it is made, which transformers 5 forbids there.
        model = get_class_from_dynamic_module(config.auto_map["AutoModel"], folder)(config)
    except ImportError as error:
        raise MissingMethodError(f"COCOM's own code asks for a package that is not installed: {error}") from error
    load_checkpoint_in_model(model, folder)
    return model.to(config.dtype).eval()


class XragReader:
    """
    xRAG answers, a slot a passage.

    Args:
        model: `XMistralForCausalLM` of its repository.
        tokenizer: Its tokenizer, padding on the left.
        retriever: `SFR` of its repository, which embeds passages.
        retriever_tokenizer: The tokenizer of `retriever`.
    """

    def __init__(self, model, tokenizer, retriever, retriever_tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.retriever, self.retriever_tokenizer = retriever, retriever_tokenizer

    @torch.inference_mode()
    def answer(self, rows: list[Row]) -> list[Answer]:
        passages = [_texts(row) for row in rows]
        prompts = [
            XRAG_PROMPT.format(slots=" ".join([XRAG_TOKEN] * len(texts)), question=row["question"])
            for row, texts in zip(rows, passages, strict=True)
        ]
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt").to(self.model.device)
        # From embeddings, `generate` returns the new tokens alone.
        output = self.model.generate(
            input_ids=inputs["input_ids"],  # (batch, seq_len)
            attention_mask=inputs["attention_mask"],
            retrieval_embeds=self._embeddings([text for texts in passages for text in texts]),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        texts = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        prompts = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        prompt_ids = [ids[is_real].tolist() for ids, is_real in prompts]
        num_tokens = _lengths(self.tokenizer, [passages_text(row) for row in rows])
        columns = zip(texts, prompt_ids, map(len, passages), num_tokens, strict=True)
        return [Answer(text.strip(), *rest) for text, *rest in columns]

    def _embeddings(self, texts: list[str]) -> torch.Tensor:
        """Of each passage, (num_passages, retriever_hidden_size)."""
        inputs = self.retriever_tokenizer(
            texts, max_length=XRAG_MAX_LENGTH, padding=True, truncation=True, return_tensors="pt"
        ).to(self.retriever.device)
        return self.retriever.get_doc_embedding(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).to(self.model.device)


def load_released_xrag(checkpoints) -> Reader:
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
    return XragReader(model, tokenizer, retriever, AutoTokenizer.from_pretrained(encoder))


def _by_passages(rows: list[Row]) -> list[list[int]]:
    """Numbers of the rows, those with as many passages together."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(len(_texts(row)), []).append(number)
    return list(groups.values())


def _texts(row: Row) -> list[str]:
    """The text of each passage; a row without one has an empty one."""
    return [passages_text({"passages": [passage]}) for passage in row["passages"]] or [""]


def _lengths(tokenizer, texts: list[str]) -> list[int]:
    """Tokens of each text, without special ones."""
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
