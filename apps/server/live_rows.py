"""Rows of a batch while their answers are generated: new ones join, and those that are done leave.

    inputs of `generate` -> a `LiveBatch` -> `advance` -> pieces of each answer, until another batch waits to join
    batches -> `LiveBatch.packed` -> batches of the rows that are not done, mostly one batch -> `advance`

A row is one request. Rows share only the tensors of keys and values; tokens, seed, stop strings and texts to copy from
are separate. So an answer does not depend on the other rows of its batch, nor on when they join. Rows whose answer
would depend on others (`frequencies_change_at`) have a batch of their own.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from ...answering_arcaligner import Answerer
from ...kv_cache_arcaligner import join_keys_values, keys_values_of
from ...modeling_arcaligner import PrefillOutputs
from .request import Answer, Request, compression_statistics


class RowSampler(LogitsProcessor):
    """Samples the tokens of a row with its own temperature, `top_k`, `top_p`, `min_p` and seed, so that different
    requests share a batch. The argmax of scores with Gumbel noise is a sample from their softmax."""

    def __init__(self, request: Request):
        self.request, self.generator = request, torch.Generator(device="cpu")
        self.generator.seed() if request.seed is None else self.generator.manual_seed(request.seed)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores (1, vocab_size) whose argmax is the next token."""
        request, row = self.request, scores.float()
        if not request.temperature:
            return row
        row = TemperatureLogitsWarper(float(request.temperature))(input_ids, row)
        if request.sampling_top_k:
            row = TopKLogitsWarper(request.sampling_top_k)(input_ids, row)
        row = TopPLogitsWarper(request.top_p)(input_ids, row)
        if request.min_p:
            row = MinPLogitsWarper(request.min_p)(input_ids, row)
        draws = torch.rand(row.shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return row - torch.log(-torch.log(draws)).to(row)


class LiveRow:
    """
    The answer to a request, token by token.

    Args:
        answerer ([`Answerer`]): That of the engine.
        request ([`Request`]): A request whose passages are selected.
        chat (`list[dict]` or `str`): Its question or chat, in the form of the processor.
        prompt_tokens (`int`): Number of tokens and slots of its prompt.
        batch_size (`int`): Number of requests that were prepared together.
        began (`float`): When the model began to compute the prompt, in the seconds of `time.monotonic`.
    """

    def __init__(
        self,
        answerer: Answerer,
        request: Request,
        chat: list[dict] | str,
        *,
        prompt_tokens: int,
        batch_size: int,
        began: float,
    ):
        model, self.processor, self.request = answerer.model, answerer.processor, request
        self.prompt_tokens, self.batch_size, self.began = prompt_tokens, batch_size, began
        self.end_ids = set(torch.tensor(model.generation_config.eos_token_id, device="cpu").reshape(-1).tolist())
        longest = self.processor.max_prompt_length
        space = request.max_new_tokens if longest is None else longest - prompt_tokens
        self.max_new_tokens = max(1, min(request.max_new_tokens, space))
        changes_at = frequencies_change_at(model.config.text_config)
        self.needs_own_batch = changes_at is not None and prompt_tokens + self.max_new_tokens > changes_at
        self.ids: list[int] = []
        self.num_generated, self.text, self.reason, self.first_token = 0, "", None, 0.0
        passages = [] if request.passages is None else request.passages.used
        self.call = answerer.answer(
            [chat],
            [passages],
            copy_bonus=[request.copy_bonus],
            scores=request.passages is not None,
            tokens_per_slot=request.tokens_per_slot or self.processor.tokens_per_slot,
        )
        counting = self._counting_processors(model.generation_config)
        options = {"generation_config": greedy(answerer, 1), "logits_processor": counting}
        options = self.call.options(options, last=[RowSampler(request)])
        self.logits_processors: LogitsProcessorList = options["logits_processor"]
        self.prefill: PrefillOutputs | None = options.get("prefill")

    def _counting_processors(self, config: GenerationConfig) -> list[LogitsProcessor]:
        """Logits processors that depend on the length of the answer. Those of `generate` would count only tokens since
        rows joined last."""
        processors: list[LogitsProcessor] = []
        min_new_tokens = max(config.min_new_tokens or 0, (config.min_length or 0) - self.prompt_tokens)
        if min_new_tokens > 0 and self.end_ids:
            processors.append(MinNewTokensLengthLogitsProcessor(0, min_new_tokens, sorted(self.end_ids)))
        if config.forced_eos_token_id is not None:
            processors.append(ForcedEOSTokenLogitsProcessor(self.max_new_tokens, config.forced_eos_token_id))
        if config.exponential_decay_length_penalty is not None and self.end_ids:
            penalty = config.exponential_decay_length_penalty
            processors.append(ExponentialDecayLengthPenalty(penalty, sorted(self.end_ids), 0))
        if config.begin_suppress_tokens:
            processors.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, 0))
        return processors

    @property
    def is_done(self) -> bool:
        return self.reason is not None

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.max_new_tokens - len(self.ids)

    def put(self, token: int) -> None:
        """Add the next token of the answer, and end the answer if it is the last one."""
        self.num_generated += 1
        self.first_token = self.first_token or time.monotonic()
        threshold, answerability = self.request.min_confidence, self.call.answerability
        if answerability is not None and threshold is not None and answerability.item() < threshold:
            self.text, self.reason = self.processor.no_answer, "stop"
            self.request.on_text(self.text)
            return self._finish()
        if token in self.end_ids:
            self.reason = "stop"
        else:
            self.ids.append(token)
            if not self.num_left:
                self.reason = "length"
            elif time.monotonic() > self.request.deadline:
                self.reason = "ended"
        self._report_text()
        if self.is_done:
            self._finish()

    def _report_text(self) -> None:
        """Report new text, except for an incomplete character and a possible beginning of a stop string."""
        text, stops = self.processor.tokenizer.decode(self.ids, skip_special_tokens=True).lstrip(), self.request.stop
        if ends := [end for stop in stops if (end := text.find(stop)) >= 0]:
            self.reason, text = "stop", text[: min(ends)]
        elif self.reason is None:
            if text.endswith("\ufffd"):
                return
            text = text[: len(text) - max((_overlap(text, stop) for stop in stops), default=0)]
        new, self.text = text[len(self.text) :], text
        if new:
            self.request.on_text(new)

    def _likelihood(self) -> float | None:
        """How likely it is that the answer is right; `None` for sampled answers and abstentions."""
        if self.request.temperature or not self.ids or (likelihood := self.call.answer_likelihood) is None:
            return None
        return likelihood.item()

    def _finish(self) -> None:
        request = self.request
        if self.reason == "ended":
            return request.end()
        passages, parts = request.passages, {"retrieval": 0.0, "slots": 0.0, "scoring": 0.0}
        if passages is not None:
            parts |= passages.seconds
        first_token = self.first_token - request.arrived
        parts["model"] = self.first_token - self.began
        parts["waiting"] = first_token - sum(parts.values())
        request.future.set_result(
            Answer(
                text=self.text,
                finish_reason=self.reason,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=len(self.ids),
                batch_size=self.batch_size,
                seconds={**parts, "first_token": first_token, "total": time.monotonic() - request.arrived},
                passages=passages,
                num_cached=request.num_cached or 0,
                answerability=None if self.call.answerability is None else self.call.answerability.item(),
                answer_likelihood=self._likelihood(),
                statistics=compression_statistics(self.processor, passages),
            )
        )


def greedy(answerer: Answerer, max_new_tokens: int) -> GenerationConfig:
    """Greedy settings of `generate`: sampling, and rules that depend on the length of an answer, are left to the logits
    processors of each row."""
    config = answerer.model.generation_config
    # Values that have no effect; with `None`, those of the model's configuration would apply. If both `min_length` and
    # `min_new_tokens` are set, transformers warns.
    neutral = {"min_length": 0} if config.min_new_tokens is None else {"min_new_tokens": 0}
    if config.exponential_decay_length_penalty is not None:
        neutral["exponential_decay_length_penalty"] = (sys.maxsize, 1.0)
    return GenerationConfig(
        # One more than are generated: a `forced_eos_token_id` of the model applies to the last one.
        max_new_tokens=max_new_tokens + 1,
        begin_suppress_tokens=[],
        eos_token_id=config.eos_token_id,
        pad_token_id=answerer.processor.tokenizer.pad_token_id or 0,
        do_sample=False,
        **neutral,
    )


def frequencies_change_at(config: PreTrainedConfig) -> int | None:
    """Number of positions above which LongRoPE uses other frequencies for all rows of a batch, also for shorter ones;
    `None` for other backbones."""
    rope = config.to_dict().get("rope_parameters") or {}
    ropes = [rope, *(values for values in rope.values() if isinstance(values, dict))]  # or one for each kind of layer
    lengths = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(lengths, default=None)


class LiveBatch:
    """
    Rows that are generated together, left-padded.

    Args:
        answerer ([`Answerer`]): That of the engine.
        rows (`list[LiveRow]`): One for each row of the tensors.
        input_ids, attention_mask, position_ids (`torch.LongTensor` of shape `(batch, seq_len)`): Prompts, and the
            answers so far.
        cache ([`Cache`]): Keys and values of the first positions, or of all.
        slot_bias (`torch.FloatTensor` of shape `(batch, prompt_len)`, *optional*): The argument of `forward`. Later
            positions have no bias.
    """

    def __init__(
        self,
        answerer: Answerer,
        rows: Sequence[LiveRow],
        input_ids: torch.LongTensor,
        attention_mask: torch.LongTensor,
        position_ids: torch.LongTensor,
        cache: Cache | None,
        slot_bias: torch.FloatTensor | None = None,
    ):
        self.answerer, self.rows = answerer, list(rows)
        self.input_ids, self.attention_mask, self.position_ids = input_ids, attention_mask, position_ids
        self.cache, self.slot_bias = cache, slot_bias

    @classmethod
    def packed(cls, batches: Sequence["LiveBatch"]) -> list["LiveBatch"]:
        """Join the unfinished rows of batches into batches of rows of similar length. At most half of each batch is
        padding."""
        rows = [(batch, number) for batch in batches for number, row in enumerate(batch.rows) if not row.is_done]
        lengths = [int(batch.attention_mask[number].sum()) for batch, number in rows]
        packs: list[list[tuple[LiveBatch, int]]] = []
        total = 0
        separate = [[(batch, number)] for batch, number in rows if batch.rows[number].needs_own_batch]
        for index in sorted(range(len(rows)), key=lengths.__getitem__):
            batch, number = rows[index]
            if batch.rows[number].needs_own_batch:
                continue
            total += lengths[index]
            if not packs or (len(packs[-1]) + 1) * lengths[index] > 2 * total:
                packs.append([])
                total = lengths[index]
            packs[-1].append(rows[index])
        return [cls._joined(pack) for pack in packs + separate]

    @classmethod
    def _joined(cls, pack: Sequence[tuple["LiveBatch", int]]) -> "LiveBatch":
        """One batch of these rows, with all of their tokens except for the last one in the cache."""
        first_batch = pack[0][0]
        if len(pack) == len(first_batch.rows) and all(batch is first_batch for batch, _ in pack):
            return first_batch
        answerer, entries, columns = first_batch.answerer, [], []
        for batch, number in pack:
            length, is_real = batch.cache.get_seq_length(), batch.attention_mask[number].bool()
            first = int(is_real.long().argmax())
            entry = keys_values_of(batch.cache, number, first, length)
            if not (is_within := is_real[first:length]).all():  # slots and question are padded separately
                entry = entry[:, :, :, is_within]
            entries.append([entry])
            columns.append([tensor[number][is_real] for tensor in (batch.input_ids, batch.position_ids)])
        padding = {"batch_first": True, "padding_side": "left"}
        ids, positions = (pad_sequence(list(rows), **padding) for rows in zip(*columns, strict=True))
        mask = pad_sequence([torch.ones_like(row_ids) for row_ids, _ in columns], **padding)
        cache = join_keys_values(entries, answerer.model.config.text_config)
        bias = None
        if any(batch.slot_bias is not None for batch, _ in pack):
            biases = [batch.whole_bias()[number][batch.attention_mask[number].bool()] for batch, number in pack]
            bias = pad_sequence(biases, **padding)
        return cls(answerer, [batch.rows[number] for batch, number in pack], ids, mask, positions, cache, bias)

    def whole_bias(self) -> torch.FloatTensor:
        """The bias of all positions so far, (batch, seq_len)."""
        if self.slot_bias is None:
            return torch.zeros_like(self.input_ids, dtype=self.answerer.model.dtype)
        return pad(self.slot_bias, (0, self.input_ids.shape[1] - self.slot_bias.shape[1]))

    @property
    def is_sparse(self) -> bool:
        """Whether at least half of the rows are done, so that it is faster to continue in a batch without them."""
        return 2 * self.num_left <= len(self.rows)

    @property
    def num_left(self) -> int:
        """Number of rows that are not done."""
        return sum(not row.is_done for row in self.rows)

    def fail(self, error: Exception) -> None:
        """End all unfinished rows with an error."""
        for row in self.rows:
            if not row.request.future.done():
                row.reason = row.reason or "failed"
                row.request.future.set_exception(error)

    def begin(self) -> None:
        """Prefill the rest of the prompts, and generate the first token of each row."""
        prefill = PrefillOutputs() if any(row.prefill is not None for row in self.rows) else None
        self._generate(lambda: True, prefill)

    def advance(self, pause: Callable[[], bool]) -> None:
        """Generate until at least half of the rows are done, or until `pause` returns true; it is called after each
        token."""
        self._generate(lambda: pause() or self.is_sparse)

    @torch.inference_mode()
    def _generate(self, pause: Callable[[], bool], prefill: PrefillOutputs | None = None) -> None:
        ids = self.answerer.model.generate(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            position_ids=self.position_ids,
            past_key_values=self.cache,
            **({} if self.slot_bias is None else {"slot_bias": self.slot_bias}),
            logits_processor=LogitsProcessorList([_RowProcessors(self.rows, prefill)]),
            generation_config=greedy(self.answerer, max(row.num_left for row in self.rows if not row.is_done)),
            stopping_criteria=StoppingCriteriaList([_NextTokens(self.rows, pause)]),
            prefill=prefill,
        )
        num_new = ids.shape[1] - self.input_ids.shape[1]
        later = torch.arange(1, num_new + 1, device=ids.device)
        ones = self.attention_mask.new_ones(len(ids), num_new)
        self.input_ids, self.attention_mask = ids, torch.cat([self.attention_mask, ones], dim=1)
        self.position_ids = torch.cat([self.position_ids, self.position_ids[:, -1:] + later], dim=1)


class _NextTokens(StoppingCriteria):
    """Gives each row its next token, and ends a call of `generate` for all rows if `pause` returns true."""

    def __init__(self, rows: Sequence[LiveRow], pause: Callable[[], bool]):
        self.rows, self.pause = rows, pause

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if not row.is_done:
                row.put(token)
        is_paused = self.pause()
        return torch.tensor([is_paused or row.is_done for row in self.rows], device=input_ids.device)


class _RowProcessors(LogitsProcessor):
    """Passes the scores and the tokens of each row to the logits processors of this row. In the call of `begin`, it
    first gives the row its outputs of the prefill."""

    def __init__(self, rows: Sequence[LiveRow], prefill: PrefillOutputs | None):
        self.rows, self.prefill = rows, prefill

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prefill is not None:
            self._give_outputs(self.prefill)
            self.prefill = None
        processed = []
        for number, (row, row_scores) in enumerate(zip(self.rows, scores.float().split(1), strict=True)):
            generated = input_ids[number : number + 1, input_ids.shape[1] - row.num_generated :]
            processed.append(row_scores if row.is_done else row.logits_processors(generated, row_scores))
        return torch.cat(processed)

    def _give_outputs(self, prefill: PrefillOutputs) -> None:
        for number, row in enumerate(self.rows):
            if row.prefill is not None:
                for name in ("answerability_logits", "slot_attention", "is_slot"):
                    values = getattr(prefill, name)
                    setattr(row.prefill, name, None if values is None else values[number : number + 1])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`.

    >>> _overlap("yes\\n", "\\n\\n")
    1
    """
    longest = min(len(stop) - 1, len(text))
    # Knuth, Morris and Pratt: for each prefix, the length of its longest proper prefix that is also its suffix.
    characters, borders = [*stop[:longest], None, *text[len(text) - longest :]], [0]
    for character in characters[1:]:
        size = borders[-1]
        while size and characters[size] != character:
            size = borders[size - 1]
        borders.append(size + (characters[size] == character))
    return borders[-1]
