"""A question and its passages to an answer: the text-generation pipeline with context slots.

Last of the flat files, in the order of the data flow:
configuration -> processing (passages to slots) -> modeling (slots to logits) -> pipeline.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, TextGenerationPipeline
from transformers.pipelines.text_generation import ReturnType
from transformers.utils.chat_template_utils import Chat

from .configuration_arcaligner import (
    REFINEMENT_SETTINGS,
    SLOT_SETTINGS,
    check_conversation,
    check_copy_bonus,
    is_number,
    longest_prompt,
)
from .encoder_arcaligner import similarities_of, with_words, word_match
from .layers_arcaligner import format_trajectory
from .processing_arcaligner import check_min_confidence, check_probe
from .segmentation_arcaligner import Segment, copied_next, copied_texts, cut_long, documents_of
from .slot_rows_arcaligner import pad_passage_ids, pad_words

# Options of a call that go to the processor.
_SLOT_OPTIONS = (*SLOT_SETTINGS, "sanitize_control_tokens")
# Options of `generate` that have more than the prompt read before its first scores.
_READ_MORE = ("guidance_scale", "prompt_lookup_num_tokens", "assistant_model")
_OF_ROWS = ("context_embeds", "context_word_ids", "context_passage_ids", "copied", "about")  # of each row
LONGEST_PASSAGE, CUT_PASSAGE = 250, 180  # words: longer documents are cut into pieces of so many

# How likely passages answer a question, beyond the paper: middle layers of a frozen model show whether it has found an
# answer. A logistic regression, the processor's `answer_probe`, reads it from the states of the prompt's last token: of
# all passages, beside the match of their words, whether to believe the answer; of each alone, which ones to read.


def check_max_passages(processor, max_passages: int) -> None:
    """Raises `ValueError` unless it is a number of passages, of an aligner that can tell the likeliest ones."""
    if not is_number(max_passages, Integral) or max_passages < 1:
        raise ValueError(f"`max_passages` is {max_passages!r}; expected a whole number of at least 1.")
    check_can_rank(processor, "`max_passages`")


def check_can_rank(processor, what: str) -> None:
    """Raises `ValueError`, about `what`, unless the aligner can be asked about each passage by itself."""
    check_probe(processor, what)
    if processor.passage_attention != "separate":
        raise ValueError(
            f"{what} needs passages that are read by themselves, and this aligner was trained to read those of a "
            'question jointly. Pass fewer documents, or take an aligner with `passage_attention` "separate".'
        )


def passages_to_read(processor) -> int | None:
    """How many of several passages are read by default: the likeliest, which answers far better than all of them unless
    several are needed; `None`, all, where the aligner cannot tell it."""
    can_tell = processor.answer_probe is not None and processor.passage_attention == "separate"
    return 1 if can_tell else None


def cut_documents(processor, documents: list) -> tuple[list, list[Segment]]:
    """The passages that documents are read as, and what each is of which document: of long ones pieces, unless the
    aligner cannot tell which of them to read."""
    longest = math.inf if passages_to_read(processor) is None else LONGEST_PASSAGE
    return cut_long(documents, longest, CUT_PASSAGE, processor.spacy_model)


# What the cosine of question and passage is worth beside the confidence, in log-odds: fitted on held-out questions.
SIMILARITY_WEIGHT = 10.0


class RankedPassage(NamedTuple):
    """How likely a passage by itself answers a question, the cosine of both (0 where neither texts nor a search tell),
    and whether the passage was kept, so that it was not read again."""

    confidence: float
    similarity: float
    is_kept: bool

    @property
    def log_odds(self) -> float:
        """What decides between passages: the confidence, and the cosine beside it."""
        sure = min(max(self.confidence, 1e-9), 1 - 1e-9)
        return math.log(sure / (1 - sure)) + SIMILARITY_WEIGHT * self.similarity


def likeliest(ranked: Mapping[int, RankedPassage], most: int) -> list[int]:
    """The numbers of the passages that most likely answer, at most `most` of them, in the order of the passages.

    >>> likeliest({0: RankedPassage(0.6, 0.8, False), 1: RankedPassage(0.7, 0.4, False)}, most=1)
    [0]
    """
    return sorted(sorted(ranked, key=lambda number: ranked[number].log_odds, reverse=True)[:most])


class AnswerConfidence(LogitsProcessor):
    """
    Watches one call of `generate` and tells how likely it is that the passages answer the question.

    It is known before the first token, and the same for all beams and samples. It does not say that the answer is
    right. Changes no score. Not with `guidance_scale`, prompt lookup or an assistant model, which have more than the
    prompt read.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): The aligner; the processor's
            `answer_probe` has the regression.
        asked (`list[tuple]`): Of each row of the batch the question, a text or a chat, and the passages that are read.
            Their `word_match` counts, too, where it was fitted and there are words.
        stops (`bool`, defaults to `False`): Raises `SeenError` in the last layer that is watched, as what comes after
            it says nothing about the confidence.

    In `with AnswerConfidence(...) as watch`, give it to `generate`, in the same thread, as one of `logits_processor`;
    `watch.confidence` (batch,) is then there. Other threads may use the model meanwhile.

    Raises:
        `ValueError`: a processor without `answer_probe`, or with that of another model.
    """

    class SeenError(Exception):
        """All states that are needed have been seen."""

    def __init__(self, model, processor, asked: Iterable[tuple[Any, list]] = (), stops: bool = False):
        check_probe(processor, "A confidence")
        probe, width = processor.answer_probe, model.config.text_config.hidden_size
        layers = model.model.decoder_layers
        self.weight = torch.tensor(probe["weight"], dtype=torch.float32, device=model.device)
        self.bias, self.words, self.processor = probe["bias"], probe.get("words"), processor
        self.asked = [*asked] if self.words else []
        if max(probe["layers"]) >= len(layers) or len(self.weight) != len(probe["layers"]) * width:
            raise ValueError(
                f"`answer_probe` has {len(self.weight)} weights for layers {probe['layers']}; expected {width} for "
                f"each, of {len(layers)} layers. It was fitted for another model: fit it again."
            )
        self.layers = [layers[layer] for layer in probe["layers"]]
        self.last = probe["layers"].index(max(probe["layers"])) if stops else None
        self.odds: torch.Tensor | None = None  # of the states, (batch * beams or samples,)
        self._states: dict[int, torch.Tensor] = {}  # of each of the layers, (batch, hidden)

    def __enter__(self) -> "AnswerConfidence":
        self.odds, self._thread = None, threading.get_ident()
        self.__dict__.pop("confidence", None)  # of a call before
        self._hooks = [
            layer.register_forward_hook(functools.partial(self._see, place)) for place, layer in enumerate(self.layers)
        ]
        return self

    def __exit__(self, *error) -> None:
        for hook in self._hooks:
            hook.remove()
        self._states = {}

    def _see(self, place: int, layer, inputs, states: torch.Tensor) -> None:
        """Keeps the last token's states (batch, hidden). Passages that are read apart come first, then the prompt."""
        if self.odds is None and threading.get_ident() == self._thread:  # others may use the same model
            self._states[place] = states[:, -1].float()
            if place == self.last:
                raise self.SeenError

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.odds is None:
            self.odds = self.log_odds()
        return scores

    @functools.cached_property
    def confidence(self) -> torch.Tensor:
        """How likely it is that the passages answer, (batch * beams or samples,). Their words are read for it."""
        matches = [word_match(self.processor, *own) for own in self.asked]
        return torch.sigmoid(with_words(self.odds, self.words, matches))

    def log_odds(self) -> torch.Tensor:
        """What the states of what was read last tell, (batch,)."""
        if len(self._states) < len(self.layers):
            raise ValueError(
                "No states of the prompt's last token were seen. Generate in `with AnswerConfidence(...)` and its "
                "thread, with a model that is not compiled as a whole, and without prompt lookup or an assistant model."
            )
        states = [self._states[place].to(self.weight.device) for place in range(len(self.layers))]
        states = torch.cat(states, dim=1)  # (batch, layers * hidden)
        return states @ self.weight + self.bias


class CopyBonus(LogitsProcessor):
    """Prefers answers in the words of the passages, in one call of `generate`.

    Beyond the paper: a slot tells what a text says better than how it is spelled, and whoever asks has the text. While
    all of an answer stands in it, from the beginning of a word on, `bonus` is added to the scores of tokens that go on
    so and, where a word ends, of those that end the answer. What the model reads is the same.

    Args:
        processor ([`ArcAlignerProcessor`]): Of the aligner.
        documents (`list[list]`): Of each row of the batch, the passages that it reads; each is copied from as a whole.
        bonus (`float` or `list`): In log-odds, of all rows or of each; `None` is the processor's `copy_bonus`.
        end_ids (`int` or `list[int]`, *optional*): Tokens that end an answer.
    """

    def __init__(self, processor, documents: list[list], bonus: float | list | None, end_ids: int | list | None):
        given = bonus if isinstance(bonus, list) else [bonus] * len(documents)
        self.bonus = [processor.copy_bonus if each is None else each for each in given]
        copied = (each if own else [] for each, own in zip(documents, self.bonus, strict=True))
        self.texts = [copied_texts(processor.tokenizer, each, processor.no_answer) for each in copied]
        self.end_ids = set() if end_ids is None else set(torch.as_tensor(end_ids).reshape(-1).tolist())
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        if not any(self.texts):
            return scores
        scores, num_each = scores.clone(), len(input_ids) // len(self.texts)  # (batch * beams or samples, vocab_size)
        for row, written in enumerate(input_ids[:, self.prompt_length :].tolist()):
            ids = copied_next(self.texts[row // num_each], written, self.end_ids)
            scores[row, ids] += self.bonus[row // num_each]
        return scores.log_softmax(dim=-1)  # else each token of a copy would add its bonus to the sum of a beam


@torch.no_grad()
def rank_passages(
    store, questions: list, documents: list | None = None, similarities: list | None = None, **kwargs: Any
) -> list[dict[int, RankedPassage]]:
    """How likely each passage by itself answers its question; `likeliest` then says which ones to read.

    Each question is read behind each of its passages. What is read of these is in the store, where `prepare` finds it.

    Args:
        store ([`SlotPrefixStore`]): Of an aligner that reads passages apart and whose confidence was fitted.
        questions, documents, kwargs: As for `SlotPrefixStore.prepare`, of several questions.
        similarities (`list[list[float]]`, *optional*): Of each question, its cosines with the passages where a search
            has them. Default: computed, for `documents`.

    Returns:
        For each question, by the number of the passage, without those that have no text.
    """
    check_can_rank(store.processor, "Ranking passages")
    if similarities is None and documents is not None:
        documents = [documents_of(each, "`documents`") for each in documents]
        similarities = list(map(functools.partial(similarities_of, store.processor.encoder), questions, documents))
    watch, ranked = AnswerConfidence(store.model, store.processor, stops=True), [{} for _ in questions]
    for rows, inputs in store.each_alone(questions, documents, **kwargs):
        with watch:
            with contextlib.suppress(watch.SeenError):
                store.read_question(inputs)
            sure = torch.sigmoid(watch.log_odds()).tolist()
        for (question, passage, is_kept), confidence in zip(rows, sure, strict=True):
            similarity = similarities[question][passage] if similarities else 0.0
            ranked[question][passage] = RankedPassage(confidence, similarity, is_kept)
    return [dict(sorted(each.items())) for each in ranked]


class ArcAlignerPipeline(TextGenerationPipeline):
    """
    Answers questions from passages that are read as slots, at the checkpoint's rate by default.

    Takes what the built-in pipeline takes, one or a list of:

    - a chat, with `documents=` in the call; the passages go before the first user message;
    - `{"question": str, "documents": [...]}` or `{"messages": chat, "documents": [...]}`; a row without `documents`
      takes those of the call;
    - a string, read as a question when the call has `documents=`, else as text to continue.

    A document is a string or `{"title": str, "text": str}`; one of more than 250 words is cut into passages, and of
    several passages the likeliest is read (`max_passages`). A chat without documents has no slots: the unchanged base
    model answers it. A question with an empty list has the one slot that stands for "no passages". Unlike the built-in
    pipeline, this one samples only when asked to.

    Example:

    ```python
    >>> ask = pipeline("text-generation", model=path, trust_remote_code=True)
    >>> ask({"question": "Who wrote it?", "documents": ["Ada wrote it."]}, return_slots=True)
    [{'generated_text': 'Ada', 'segments': [...], 'trajectories': [...], 'statistics': {'tokens': 5, 'slots': 1, ...}}]
    ```
    """

    _load_processor = True
    # The processor's: two tokenizers would have two padding sides.
    _load_tokenizer = False
    _default_generation_config = GenerationConfig(max_new_tokens=256, do_sample=False)

    def __init__(self, model, processor, tokenizer=None, **kwargs):
        if processor.max_prompt_length is None:  # the checkpoint does not say
            processor.max_prompt_length = longest_prompt(model.config.text_config)
        super().__init__(model=model, processor=processor, tokenizer=tokenizer or processor.tokenizer, **kwargs)

    @functools.cached_property
    def _passages(self):
        """What was read of passages that were asked about one by one."""
        return self.model.slot_prefix_store(self.processor, max_bytes=2**28)

    def check_model_type(self, supported_models):
        super().check_model_type(["ArcAlignerForCausalLM"])

    def __call__(self, text_inputs: Any, **kwargs):
        """
        Answers one or a list of inputs.

        Args:
            text_inputs (`str`, `dict`, chat or a list of one of them): See the class.
            documents (`list`, *optional*): The passages of every input without its own.
            return_slots (`bool`, *optional*, defaults to `False`): Adds what the passages became.
            tokens_per_slot (`int` or `"segment"`, *optional*): Tokens of text for a slot. Default: the processor's.
            max_slots (`int`, *optional*): Maximum number of slots per input, the first ones.
            max_passages (`int`, *optional*):
                Of more passages, only those that most likely answer are read, in their order: each is first asked
                about by itself. See [`rank_passages`]. What was read for this is kept, in at most 256 MiB, for asking
                about these passages again. Default: 1, or all, uncut, where the aligner cannot tell.
            min_confidence (`float`, *optional*):
                Where it is less likely, from 0 to 1, that the passages answer the question, the answer becomes the
                processor's `no_answer`. See [`AnswerConfidence`]. Not with a `streamer`, which would be told the
                answer, `return_tensors`, `guidance_scale`, prompt lookup or an assistant model.
            copy_bonus (`float`, *optional*): How much answers in the words of the passages are preferred, see
                [`CopyBonus`]; 0 writes freely. Default: the processor's.
            sanitize_control_tokens (`bool`, defaults to `True`): Whether special tokens of texts are plain text.
            kwargs (`dict`): As for the built-in pipeline: `batch_size`, `return_full_text`, `streamer`, options of
                `generate`, among them `gate_mode`, `gate_threshold`, `max_refinement_steps` and `refinement_budget`.

        Returns:
            As the built-in pipeline: for each input a list with a dictionary for each sequence.

            - **generated_text** (`str` or chat) -- The answer to a question; a chat with the answer appended, or with
              `return_full_text=False` the answer only. With `return_slots` also:
            - **segments** (`list[dict]`) -- What each slot stands for: `document`, `start`, `end` (characters), `text`.
            - **trajectories** (`list[list[str]]`) -- For each layer and slot the passes taken.
            - **statistics** (`dict`) -- `tokens` of the passages, `slots` and `compression_rate`, the measured tokens
              per slot; with `max_slots`, how many segments are `dropped`;
              `confidence`, how likely it is that the passages answer, where that was fitted; where
              `max_passages` left some out, `passage_confidences`, that of each document with a text, by its number.
        """
        if isinstance(text_inputs, list | tuple) and not text_inputs:
            raise ValueError("The list of inputs is empty; expected a chat, a string or a question with its passages.")
        return super().__call__(text_inputs, **kwargs)

    def _sanitize_parameters(
        self,
        return_slots: bool | None = None,
        min_confidence: float | None = None,
        max_passages: int | None = None,
        copy_bonus: float | None = None,
        **kwargs,
    ):
        given = {name: kwargs.pop(name, None) for name in _SLOT_OPTIONS} | {"return_slots": return_slots}
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        preprocess |= {name: value for name, value in given.items() if value is not None}
        if copy_bonus is not None:
            check_copy_bonus(copy_bonus)
        given = {"return_slots": return_slots, "copy_bonus": copy_bonus}
        forward |= {name: value for name, value in given.items() if value is not None}
        if max_passages is not None:
            check_max_passages(self.processor, max_passages)
            preprocess["max_passages"] = max_passages
        preprocess |= {name: kwargs[name] for name in REFINEMENT_SETTINGS if name in kwargs}  # to ask about passages
        if min_confidence is not None:
            check_min_confidence(self.processor, min_confidence)
            if given := [name for name in ("streamer", "return_tensors") if kwargs.get(name)]:
                raise ValueError(f"`min_confidence` is set, but not possible with `{given[0]}`. Leave one out.")
            forward["min_confidence"] = postprocess["min_confidence"] = min_confidence
        return preprocess, forward, postprocess

    def preprocess(
        self,
        prompt_text: str | dict | Chat,
        documents: list | None = None,
        return_slots: bool = False,
        max_passages: int | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """`input_ids`, `attention_mask` (1, seq_len) and, in `row`, what is not padded."""
        slots, gates = ({n: kwargs.pop(n) for n in own if n in kwargs} for own in (_SLOT_OPTIONS, REFINEMENT_SETTINGS))
        prompt, documents, is_question = _read_input(prompt_text, documents)
        chat = Chat([{"role": "user", "content": prompt}]) if is_question else prompt
        given = [] if documents is None else documents_of(documents, "`documents` of row 0")
        passages, read = cut_documents(self.processor, given)
        if isinstance(prompt, Chat):
            check_conversation(prompt.messages)
        confidences, copied, about = None, [], ("", [])
        if isinstance(prompt, str) and not is_question:
            encoded = super().preprocess(prompt, **kwargs)
        else:
            asked = chat if is_question and self.processor.chat_template is not None else prompt
            template = {name: kwargs.pop(name, None) for name in ("continue_final_message", "tools")}
            if isinstance(asked, Chat) and template["continue_final_message"] is None:
                template["continue_final_message"] = asked.messages[-1]["role"] == "assistant"
            template["add_generation_prompt"] = not template["continue_final_message"]
            slots.setdefault("sanitize_control_tokens", True)
            messages = asked.messages if isinstance(asked, Chat) else asked
            numbers, confidences = self._choose(messages, passages, read, max_passages, slots | template | gates)
            read, passages = [read[number] for number in numbers], [passages[number] for number in numbers]
            copied = [] if template["continue_final_message"] else passages  # else an answer has begun
            about = messages, passages if slots.get("max_slots") is None else []  # else some texts may not be read
            slots |= {"documents": None if documents is None else passages, "return_segments": return_slots}
            encoded = self._encode(asked, slots | {"return_tensors": "pt"}, template, **kwargs)
        row = self._describe_row(encoded, is_question, return_slots, read, confidences)
        row |= {"copied": copied, "about": about}
        return {name: encoded[name] for name in ("input_ids", "attention_mask")} | {"row": row, "prompt_text": chat}

    def _choose(
        self, asked: str | list, passages: list, pieces: list[Segment], max_passages: int | None, options: dict
    ) -> tuple[Sequence[int], dict[int, float] | None]:
        """The numbers of the passages to read and, where some are left out, of each document the highest confidence."""
        if len(passages) <= (most := max_passages or passages_to_read(self.processor) or len(passages)):
            return range(len(passages)), None
        (ranked,) = rank_passages(self._passages, [asked], [passages], **options)
        surest = sorted(ranked, key=lambda number: ranked[number].confidence)  # of a document's the last one counts
        return likeliest(ranked, most), {pieces[number].document: ranked[number].confidence for number in surest}

    def _encode(
        self,
        prompt: str | Chat,
        slots: dict[str, Any],
        template: dict[str, Any],
        truncation: bool | str | None = None,
        padding: bool | str | None = None,
        max_length: int | None = None,
        tokenizer_encode_kwargs: dict | None = None,
        **generate_kwargs,
    ) -> dict[str, Any]:
        """Runs the processor on a chat or, without a chat template, on a question."""
        options = {"truncation": truncation, "padding": padding, "max_length": max_length}
        options = {name: value for name, value in options.items() if value is not None}
        options |= tokenizer_encode_kwargs or {}
        if isinstance(prompt, str):
            return self.processor(text=prompt, **slots, **options)
        asked = {"tokenize": True, "return_dict": True, "processor_kwargs": options}
        return self.processor.apply_chat_template(prompt.messages, **asked, **template, **slots)

    def _forward(
        self,
        model_inputs: dict,
        return_slots: bool = False,
        min_confidence: float | None = None,
        copy_bonus: float | None = None,
        **generate_kwargs,
    ) -> dict:
        row = model_inputs.pop("row")
        rows = row if isinstance(row, list) else [row]  # a list when it comes from a batch
        embeds, words, numbers, copied, about = ([each.pop(name) for each in rows] for name in _OF_ROWS)
        slots = {
            "context_embeds": pad_sequence(embeds, batch_first=True),  # (batch, max_slots, encoder_hidden_size)
            "context_word_ids": pad_words(words),  # (batch, max_slots, max_words)
            "context_passage_ids": pad_passage_ids(numbers),  # (batch, max_slots)
        }
        slots = {name: each for name, each in slots.items() if each.shape[1]}
        watch, added = None, []
        config = generate_kwargs.get("generation_config") or self.model.generation_config
        reads_more = any(generate_kwargs.get(name) or getattr(config, name, None) for name in _READ_MORE)
        if min_confidence is not None and reads_more:
            raise ValueError(f"`min_confidence` is set, but not possible with any of {', '.join(_READ_MORE)}.")
        is_asked = min_confidence is not None or (return_slots and not reads_more)
        if slots and self.processor.answer_probe is not None and is_asked:
            added = [watch := AnswerConfidence(self.model, self.processor, about)]
        if any(copied):
            own, default = config.eos_token_id, self.model.generation_config.eos_token_id
            end_ids = generate_kwargs.get("eos_token_id", default if own is None else own)
            added.append(CopyBonus(self.processor, copied, copy_bonus, end_ids))
        if added:
            generate_kwargs["logits_processor"] = [*(generate_kwargs.get("logits_processor") or []), *added]
        with self.model.recorded_depths() as depths, watch or contextlib.nullcontext():
            outputs = super()._forward(model_inputs, **slots, **generate_kwargs)
        if watch is not None:  # the same for all beams or samples of a row
            outputs["confidence"] = watch.confidence[:: len(watch.confidence) // len(rows)].cpu()
        if return_slots and depths:  # (batch * num_beams, num_layers, max_slots), the same for all beams of a row
            outputs["recursion_depth"] = depths[0][:: len(depths[0]) // len(rows)]
        return outputs | {"row": row}

    def postprocess(
        self,
        model_outputs: dict,
        return_type: ReturnType | None = None,
        min_confidence: float | None = None,
        **kwargs,
    ) -> list[dict[str, Any]]:
        row = model_outputs.pop("row")
        depth = model_outputs.pop("recursion_depth", None)  # (1, num_layers, max_slots)
        if return_type is None:
            return_type = ReturnType.NEW_TEXT if row["is_question"] else ReturnType.FULL_TEXT
        sure = model_outputs.pop("confidence", [None])[0]
        records = super().postprocess(model_outputs, return_type=return_type, **kwargs)
        if min_confidence is not None and row["has_slots"] and sure < min_confidence:
            for record in records:  # a text, or a chat whose last message is the answer
                answer = record["generated_text"]
                if isinstance(answer, str):
                    record["generated_text"] = self.processor.no_answer
                else:
                    answer[-1]["content"] = self.processor.no_answer
        if "statistics" not in row:
            return records
        statistics, num_slots = row["statistics"], row["statistics"]["slots"]
        if sure is not None and row["has_slots"]:
            statistics = statistics | {"confidence": sure.item()}
        layers = depth[0, :, :num_slots].tolist() if num_slots else []
        trajectories = [[format_trajectory(each) for each in layer] for layer in layers]
        slots = {"segments": row["segments"], "trajectories": trajectories, "statistics": statistics}
        return [record | slots for record in records]

    def _describe_row(
        self,
        encoded: dict,
        is_question: bool,
        return_slots: bool,
        read: Sequence[Segment],
        confidences: dict[int, float] | None,
    ) -> dict[str, Any]:
        """A row's embeddings (num_slots, encoder_hidden_size), words (num_slots, max_words) and passages (num_slots,),
        and what its slots stand for: `read` is what is read of which document, `confidences` are those of all."""
        width = self.model.config.encoder_hidden_size
        empty = torch.zeros(1, 0, width), torch.full((1, 0, 1), -1), torch.full((1, 0), -1)  # of a row without slots
        slots = {name: encoded.get(name, none)[0] for name, none in zip(_OF_ROWS, empty, strict=False)}
        row = {"is_question": is_question, "has_slots": "context_embeds" in encoded} | slots
        if return_slots:
            segments = encoded.get("segments", [[]])[0]
            row["segments"] = [asdict(each.of_document(read[each.document])) for each in segments]
            no_slots = {"tokens": 0, "slots": 0, "compression_rate": None}
            row["statistics"] = encoded.get("statistics", [no_slots])[0]
            if confidences is not None:
                row["statistics"] |= {"passage_confidences": dict(sorted(confidences.items()))}
        return row

    def save_pretrained(self, save_directory: str, **kwargs):
        """Writes model, code and processor, for `pipeline(model=save_directory)` to load."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.processor.save_pretrained(save_directory)


def _read_input(given: Any, documents: list | None) -> tuple[str | Chat, list | None, bool]:
    """An input as (prompt, its documents or `None` for no slots, whether it is a question)."""
    if isinstance(given, dict):
        documents = given.get("documents", documents)
        others = ", ".join(f"`{key}`" for key in given if key not in ("question", "messages", "documents"))
        if documents is None and ("question" in given or (others and "messages" in given)):
            raise ValueError(  # passages under another name would be ignored
                f"A row has no `documents`{others and f' but {others}'}. Passages go in `documents`, a list of strings "
                'or {"title", "text"}; an empty list asks without any.'
            )
    if isinstance(given, dict) and "messages" in given:
        if not isinstance(given["messages"], list | tuple):
            raise ValueError(f"`messages` is {given['messages']!r}; expected a list of messages.")
        return Chat(given["messages"]), documents, False
    if isinstance(given, dict) and isinstance(given.get("question"), str):
        return given["question"], documents, True
    if isinstance(given, str):
        return given, documents, documents is not None
    if isinstance(given, Chat):
        return given, documents, False
    found = type(given).__name__
    if isinstance(given, dict):
        found = ", ".join(f"`{key}` of type {type(value).__name__}" for key, value in given.items())
    raise ValueError(
        'Expected a chat, a string or {"question": str, "documents": [...]}, one or a list of one of them (of a data '
        f"set `list(dataset)`); got {found}."
    )
