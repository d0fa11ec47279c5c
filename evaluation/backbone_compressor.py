"""LLMLingua with a language model that is loaded already, in today's transformers."""

import math
from types import SimpleNamespace

from llmlingua import PromptCompressor
from transformers import DynamicCache

PART_SIZE = 200  # tokens that are thinned out at a time, the package's default


class PairCacheModel:
    """
    A language model as `llmlingua` calls it: its cache is a list of (keys, values), one pair a layer.

    Args:
        model: A causal language model of transformers.
    """

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, attention_mask, past_key_values, use_cache):
        cache = DynamicCache(past_key_values)  # a pair (batch, heads, seq_len, head_dim) a layer, or `None`
        output = self.model(input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=use_cache)
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        return SimpleNamespace(logits=output.logits.float(), past_key_values=pairs)


class BackboneCompressor(PromptCompressor):
    """
    LLMLingua, whose scores come from `model`.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
    """

    # The parent's `__init__` would load a model of its own and download OpenAI's tokenizer for counts we do not use.
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.device = PairCacheModel(model), tokenizer, model.device
        self.oai_tokenizer = tokenizer
        self.max_position_embeddings = model.config.get_text_config().max_position_embeddings
        self.use_llmlingua2 = False
        self.cache_bos_num = 10

    def compress(self, text: str, rate: float) -> str:
        """About a share `rate` of the tokens of `text`."""
        num_tokens = self.get_token_length(text, add_special_tokens=False)
        if num_tokens < 2:  # nothing to predict one from
            return text
        # In equal parts: the package leaves a last one that is shorter than the others as it is.
        part_size = num_tokens // math.ceil(num_tokens / PART_SIZE)
        return self.compress_prompt([text], rate=rate, iterative_size=part_size)["compressed_prompt"]
