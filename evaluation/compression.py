"""Prompt compression: the backbone reads part of the passages' text.

The beginning of it ("truncated"), or what LLMLingua keeps: what a language model, here the backbone itself, finds
surprising.

With `tokens_per_slot`, each keeps as many tokens as the aligner has slots at that rate: the same number of positions.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

from transformers import DynamicCache

from ..base_model_arcaligner import CACHE
from ..common.rows import Row
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import tokenize_segments
from ..train.prompts import passages_text
from .answering import MissingMethodError, count_tokens

RATE = 1 / 3  # the share of tokens that LLMLingua keeps, as in the paper
PART_SIZE = 200  # tokens that LLMLingua looks at together, the package's default

Compress = Callable[[str, float], str]  # a text and the share of its tokens to keep


def count_slots(processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None = None) -> int:
    """The slots of a row's passages, without encoding them; the processor's rate where none is given."""
    rate = processor.tokens_per_slot if tokens_per_slot is None else tokens_per_slot
    segments = processor.slot_encoder.segment_documents(row["passages"])
    if rate == "segment":
        return max(1, len(segments))
    tokens = tokenize_segments(processor.tokenizer, segments, row["passages"])
    return max(1, sum(len(each.runs(rate)) for each in tokens))


def first_tokens(processor: ArcAlignerProcessor, text: str, number: int) -> str:
    """The first tokens of a text."""
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return processor.tokenizer.decode(ids[:number]).strip()


def truncated(model, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str | None) -> list[str]:
    """As many tokens of each row's passages as the aligner has slots."""
    return [first_tokens(processor, passages_text(row), count_slots(processor, row, tokens_per_slot)) for row in rows]


def compressed(model, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str | None) -> list[str]:
    """What LLMLingua, with `model` as the scorer, leaves of each row's passages: a third, or with `tokens_per_slot` no
    more tokens than slots."""
    compress = llmlingua_compressor(model, processor.tokenizer)
    texts = [passages_text(row) for row in rows]
    if tokens_per_slot is None:
        return [compress(text, RATE) for text in texts]
    found = []
    for row, text, length in zip(rows, texts, count_tokens(processor.tokenizer, texts), strict=True):
        num_slots = count_slots(processor, row, tokens_per_slot)
        kept = compress(text, num_slots / length) if length > num_slots else text
        found.append(first_tokens(processor, kept, num_slots))
    return found


class PairCacheModel:
    """A language model as `llmlingua` calls it: its cache is a list of (keys, values), one pair per layer."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, attention_mask, past_key_values, use_cache):
        cache = DynamicCache(past_key_values)  # one pair (batch, heads, seq_len, head_dim) per layer, or `None`
        output = self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache, **{CACHE: cache})
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        return SimpleNamespace(logits=output.logits.float(), past_key_values=pairs)


def llmlingua_compressor(model, tokenizer) -> Compress:
    """LLMLingua whose scores come from `model`, a causal language model of transformers, with its `tokenizer`."""
    try:
        from llmlingua import PromptCompressor
    except ModuleNotFoundError as error:
        raise MissingMethodError(
            "the package llmlingua is not installed; `pip install llmlingua==0.2.2` gets it"
        ) from error
    # Without `__init__`, which would load a model of its own and download OpenAI's tokenizer for counts we do not use.
    compressor = PromptCompressor.__new__(PromptCompressor)
    compressor.model, compressor.tokenizer, compressor.device = PairCacheModel(model), tokenizer, model.device
    compressor.oai_tokenizer = tokenizer
    compressor.max_position_embeddings = model.config.get_text_config().max_position_embeddings
    compressor.use_llmlingua2 = False
    compressor.cache_bos_num = 10

    def compress(text: str, rate: float) -> str:
        num_tokens = compressor.get_token_length(text, add_special_tokens=False)
        if num_tokens < 2:  # nothing to predict one from
            return text
        # In equal parts: the package leaves a last part that is shorter than the others as it is.
        part_size = num_tokens // math.ceil(num_tokens / PART_SIZE)
        return compressor.compress_prompt([text], rate=rate, iterative_size=part_size)["compressed_prompt"]

    return compress
