"""Text-generation pipeline: from a question and its passages to an answer.

Last of the flat files, in the order of the data flow:
configuration -> processing (passages to slots) -> modeling (slots to logits) -> pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, TextGenerationPipeline
from transformers.pipelines.text_generation import ReturnType
from transformers.utils.chat_template_utils import Chat

from .answering_arcaligner import EXTRA_PREFILL_OPTIONS, Answerer, ScoredPassage
from .configuration_arcaligner import REFINEMENT_SETTINGS, SLOT_SETTINGS, longest_prompt
from .encoder_arcaligner import PrecomputedSlots, documents_of, pad_slots
from .kv_cache_arcaligner import QuestionBatch
from .segmentation_arcaligner import LOADING, Segment
from .zoom_arcaligner import check_zoom, inputs_of, zoom_in

# Options of a call that go to the processor.
_SLOT_OPTIONS = (*SLOT_SETTINGS, "sanitize_control_tokens")

# A placeholder for ids that are known later, (1, seq_len).
_UNKNOWN_IDS = torch.zeros(1, 1, dtype=torch.long, device="cpu")

# Options of a call that pad or cut a prompt.
_PROMPT_OPTIONS = ("truncation", "padding", "max_length", "tokenizer_encode_kwargs")


def _repeats_prompts_of_call(options: dict[str, Any]) -> bool:
    config = options.get("generation_config")
    return _repeats_prompts(options) or (config is not None and _repeats_prompts(config.to_dict()))


def _repeats_prompts(options: dict[str, Any]) -> bool:
    """Whether `generate` with these options repeats prompts, so that a cache with each prompt once is not enough."""
    has_copies = any(options.get(name) not in (None, 1) for name in ("num_beams", "num_return_sequences"))
    has_cache = any(options.get(name) is not None for name in ("cache_implementation", "past_key_values", "cache"))
    has_extra_prefill = any(options.get(name) for name in EXTRA_PREFILL_OPTIONS)
    return has_copies or has_cache or has_extra_prefill or options.get("use_cache") is False


@dataclass
class Row:
    """The data of an input in the pipeline, in addition to its padded ids."""

    is_question: bool
    slots: PrecomputedSlots  # empty without slots
    question: str | list[dict] = ""
    passages: list = field(default_factory=list)  # those that are used, if their texts are known
    copied: list = field(default_factory=list)  # the passages that the answer may copy
    # Of the slots; `None` if their texts are not known, or if they have different numbers of tokens.
    tokens_per_slot: int | str | None = None
    trace: dict[str, Any] | None = None  # with `return_slots`: `segments` and `statistics`
    # If passages were scored, the question with the used ones, which are cached. Then ids and `slots` of this row are
    # not known until a batch is made.
    scored: QuestionBatch | None = None
    # The bias on the attention to each passage before the selection; `None` if they are used equally.
    prior: list[float] | None = None
    numbers: Sequence[int] = ()  # those of the used passages, among the passages before the selection

    @property
    def has_slots(self) -> bool:
        return self.scored is not None or len(self.slots.context_embeds) > 0


class ArcAlignerPipeline(TextGenerationPipeline):
    """
    Answers questions from passages as slots, at the checkpoint's tokens per slot by default.

    Takes the inputs of the built-in pipeline, one or a list of them:

    - a chat, with `documents=` in the call; the passages go before the first user message;
    - `{"question": str, "documents": [...]}` or `{"messages": chat, "documents": [...]}`; an input without `documents`
      takes those of the call;
    - a string, which is a question if the call has `documents=`, else a text to continue.

    A document is a string or `{"title": str, "text": str}`; a document of more than 360 tokens is cut into passages. Of
    several passages the top-ranked one is used, or the two that a multi-hop question needs (`max_passages`). A chat
    without documents has no slots: the unchanged base model answers it. A question with an empty list of documents gets
    one slot, for "no passages". Unlike the built-in pipeline, this one samples only with `do_sample=True`.

    Example:

    ```python
    >>> ask = pipeline("text-generation", model=path, trust_remote_code=True)
    >>> ask({"question": "Who wrote it?", "documents": ["Ada wrote it."]}, return_slots=True)
    [{'generated_text': 'Ada', 'segments': [...], 'trajectories': [...], 'statistics': {'tokens': 5, 'slots': 1, ...}}]
    ```
    """

    _load_processor = True
    # The tokenizer is the processor's: two tokenizers could differ in their padding side.
    _load_tokenizer = False
    _answerer = None
    _default_generation_config = GenerationConfig(max_new_tokens=256, do_sample=False)

    def __init__(self, model, processor, tokenizer=None, **kwargs):
        if processor.max_prompt_length is None:  # the checkpoint does not set it
            processor.max_prompt_length = longest_prompt(model.config.text_config)
        device_map = getattr(model, "hf_device_map", None) or {"": model.device}
        if next(iter(device_map.values())) == "disk":
            raise ValueError(
                "The first layers of the model are offloaded to disk (see `model.hf_device_map`), so a pipeline cannot "
                "move its inputs to their device. Load the model with a larger `max_memory` to keep these layers in "
                "memory, or call `model.generate` with the outputs of the processor."
            )
        self._repeats = _repeats_prompts_of_call(kwargs)  # in every call
        super().__init__(model=model, processor=processor, tokenizer=tokenizer or processor.tokenizer, **kwargs)

    @property
    def answerer(self) -> Answerer:
        """The [`Answerer`] of this pipeline, with a cache of 256 MiB for the passages that it scores."""
        with LOADING:
            if self._answerer is None:
                cache = self.processor.passage_cache(self.model, max_bytes=2**28)
                self._answerer = Answerer(self.model, self.processor, cache)
            return self._answerer

    def check_model_type(self, supported_models):
        super().check_model_type(["ArcAlignerForCausalLM"])

    def __call__(self, text_inputs: Any, **kwargs):
        """
        Answer one input or a list of inputs.

        Args:
            text_inputs (`str`, `dict`, chat, or a list of them): See the class.
            documents (`list`, *optional*): The passages of every input that has no `documents`.
            return_slots (`bool`, *optional*, defaults to `False`): Whether to return the slots of the passages.
            tokens_per_slot (`int` or `"segment"`, *optional*): Tokens of text for a slot. Default: the processor's.
            max_slots (`int`, *optional*): Maximum number of slots per input; the first ones are kept.
            max_passages (`int`, *optional*):
                Maximum number of passages. If there are more, only the top-ranked ones are used, in the given order,
                among them the two that a multi-hop question needs. Each passage is scored by itself, the most similar
                ones first and the others only if these do not decide. Several passages are weighted by their scores, if
                the attention kernel takes a bias (`eager` and `sdpa` do). See [`Answerer`]. Keys and values of the
                scoring are cached, in at most 256 MiB, and reused for the answer. Default: 1, or the 2 that a multi-hop
                question needs; all, uncut, if the aligner cannot score passages.
            min_confidence (`float`, *optional*):
                If the answerability, from 0 to 1, is lower than this, the answer is the processor's `no_answer`.
                Answerability is not the chance that the answer is right. See [`AnsweringCall`]. Incompatible with
                `streamer`, which would emit the answer before it can be replaced, and with `return_tensors`,
                `guidance_scale`, `prompt_lookup_num_tokens` and `assistant_model`.
            zoom (`float`, *optional*):
                A number above 0 and at most 1, for example 0.7: the passages are read twice, first with more
                `tokens_per_slot` (by default 4 times the processor's). Then the slots to which pointer heads attend
                most, which together have this share of the attention, are replaced with slots of the processor's
                `tokens_per_slot`. See [`zoom_in`]. Incompatible with `max_slots`. Default: read once.
            copy_bonus (`float`, *optional*): Bias towards words of the passages, see
                [`PassageCopyLogitsProcessor`]; 0 switches it off. Default: the processor's.
            sanitize_control_tokens (`bool`, defaults to `True`): Whether special tokens in texts are plain text.
            kwargs (`dict`): As for the built-in pipeline: `batch_size`, `return_full_text`, `streamer`, options of
                `generate`, among them `gate_mode`, `gate_threshold`, `max_refinement_steps` and `refinement_budget`.

        Returns:
            As the built-in pipeline: for each input a list with a dictionary for each generated sequence.

            - **generated_text** (`str` or chat) -- The answer to a question; a chat with the answer appended, or with
              `return_full_text=False` the answer only. With `return_slots` also:
            - **segments** (`list[dict]`) -- The text of each slot: `document`, `start`, `end` (characters), `text`.
            - **trajectories** (`list[list[str]]`) -- The passes of each slot through each layer
              ([`format_trajectory`]).
            - **statistics** (`dict`) -- `tokens` of the passages, `slots`, and `compression_rate`, the measured tokens
              per slot. With `max_slots`, how many segments are `dropped`. If they were fitted, `answerability`, how
              likely it is that the passages contain an answer, and `answer_likelihood`, how likely it is that the
              answer is right (only for greedy answers that are not abstentions). If passages were scored,
              `passage_answerabilities`, the highest answerability of each document's scored passages, by the number of
              the document. In 0.2, `answerability` was `confidence` and `passage_answerabilities` was
              `passage_confidences`; these names will be removed in the next release.
        """
        if isinstance(text_inputs, list | tuple) and not text_inputs:
            raise ValueError(
                "The list of inputs is empty; expected at least one chat, string or question with its passages."
            )
        return super().__call__(text_inputs, **kwargs)

    def _sanitize_parameters(
        self,
        return_slots: bool | None = None,
        min_confidence: float | None = None,
        max_passages: int | None = None,
        copy_bonus: float | None = None,
        zoom: float | None = None,
        **kwargs,
    ):
        slots = {name: kwargs.pop(name, None) for name in _SLOT_OPTIONS} | {"return_slots": return_slots}
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        preprocess |= {name: value for name, value in slots.items() if value is not None}
        if any(setting is not None for setting in (max_passages, min_confidence, copy_bonus)):
            self.answerer.check(max_passages=max_passages, min_confidence=min_confidence, copy_bonus=copy_bonus)
        answers = {"return_slots": return_slots, "copy_bonus": copy_bonus}
        forward |= {name: value for name, value in answers.items() if value is not None}
        options = {"max_passages": max_passages, "zoom": zoom}
        preprocess |= {name: value for name, value in options.items() if value is not None}
        if _repeats_prompts_of_call(kwargs):
            preprocess["prefills_again"] = True
        preprocess |= {name: kwargs[name] for name in REFINEMENT_SETTINGS if name in kwargs}  # for scoring passages
        if min_confidence is not None:
            if others := [name for name in ("streamer", "return_tensors") if kwargs.get(name)]:
                raise ValueError(f"`min_confidence` cannot be combined with `{others[0]}`. Leave one of the two out.")
            forward["min_confidence"] = postprocess["min_confidence"] = min_confidence
        return preprocess, forward, postprocess

    def preprocess(
        self,
        prompt_text: str | dict | Chat,
        documents: list | None = None,
        return_slots: bool = False,
        max_passages: int | None = None,
        zoom: float | None = None,
        prefills_again: bool = False,
        **kwargs,
    ) -> dict[str, Any]:
        """`input_ids`, `attention_mask` (1, seq_len) and, in `row`, the data that is not padded."""
        slots = {name: kwargs.pop(name) for name in _SLOT_OPTIONS if name in kwargs}
        gates = {name: kwargs.pop(name) for name in REFINEMENT_SETTINGS if name in kwargs}
        if zoom is not None:
            sizes = slots.get("tokens_per_slot"), slots.get("max_slots")
            slots["tokens_per_slot"] = check_zoom(self.model, self.processor, zoom, *sizes)
        prompt, documents, is_question = _parse_input(prompt_text, documents)
        chat = Chat([{"role": "user", "content": prompt}]) if is_question else prompt
        answerer = self.answerer
        passages, spans = answerer.cut([] if documents is None else documents_of(documents, "`documents` of an input"))
        scores, texts, scored, prior, numbers = None, {}, None, None, ()
        if isinstance(prompt, str) and not is_question:
            encoded = super().preprocess(prompt, **kwargs)
        else:
            conversation = chat if is_question and self.processor.chat_template is not None else prompt
            messages = conversation.messages if isinstance(conversation, Chat) else conversation
            template = {name: kwargs.pop(name, None) for name in ("continue_final_message", "tools")}
            if isinstance(conversation, Chat) and template["continue_final_message"] is None:
                template["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
            template["add_generation_prompt"] = not template["continue_final_message"]
            slots.setdefault("sanitize_control_tokens", True)
            options = slots | template | gates
            ((numbers, scores, scored, prior),) = answerer.select([messages], [passages], max_passages, **options)
            scores = None if scores is None else _by_document(scores, spans)
            spans, passages = [spans[number] for number in numbers], [passages[number] for number in numbers]
            if zoom is not None or self._prefills_again(prefills_again, return_slots, gates, kwargs):
                scored = None
            texts = {
                "question": messages,
                "passages": passages if slots.get("max_slots") is None else [],  # else some texts may have no slots
                "copied": [] if template["continue_final_message"] else passages,  # else an answer has begun
                "tokens_per_slot": None
                if zoom is not None
                else slots.get("tokens_per_slot") or self.processor.tokens_per_slot,
            }
            if scored is None:
                slots |= {"documents": None if documents is None else passages, "return_segments": return_slots}
                encode = partial(self._encode, conversation, template=template, return_tensors="pt", **kwargs)
                encoded = encode(slots)
                if zoom is not None and passages:
                    priors = None if prior is None else [prior[number] for number in numbers]
                    encoded = self._zoom(encode, encoded, slots, passages, zoom, priors, gates)
            else:
                encoded = {"input_ids": _UNKNOWN_IDS, "attention_mask": torch.ones_like(_UNKNOWN_IDS)}
                encoded |= self._trace_scored(passages, slots) if return_slots else {}
        slots = [encoded[name][0].cpu() if name in encoded else None for name in PrecomputedSlots._fields]
        if slots[0] is None:
            slots[0] = torch.zeros(0, self.model.config.encoder_hidden_size, device="cpu")
        row = Row(is_question, PrecomputedSlots(*slots), **texts, scored=scored, prior=prior, numbers=numbers)
        if return_slots:
            row.trace = _trace_of(encoded, spans, scores)
        return {name: encoded[name] for name in ("input_ids", "attention_mask")} | {"row": row, "prompt_text": chat}

    def _prefills_again(self, call_repeats: bool, return_slots: bool, gates: dict, options: dict) -> bool:
        """Whether scored passages are computed again with the prompt, for results that a cache does not have."""
        has_steps = return_slots and self.model.config.refines(**gates)  # reported only for slots that are computed
        is_cut = any(options.get(name) is not None for name in _PROMPT_OPTIONS)
        repeats = call_repeats or self._repeats or _repeats_prompts(self.model.generation_config.to_dict())
        return repeats or has_steps or is_cut

    def _zoom(
        self,
        encode: Callable,
        encoded: dict[str, Any],
        slots: dict[str, Any],
        passages: list,
        zoom: float,
        prior: list[float] | None,
        gates: dict,
    ) -> dict[str, Any]:
        """Read an `encoded` prompt, and `encode` it again with finer slots in place of some."""
        device, names = self.model.device, ("input_ids", "attention_mask", *PrecomputedSlots._fields)
        inputs = {name: encoded[name].to(device) for name in names if name in encoded}
        prior = None if prior is None else torch.tensor([prior], device=device)
        (row,) = zoom_in(
            self.model, self.processor, inputs, [passages], slots["tokens_per_slot"], zoom, passage_prior=prior, **gates
        )
        finer = {name: values for name, (values,) in inputs_of([row]).items()}
        new = encode(finer | {"sanitize_control_tokens": slots["sanitize_control_tokens"]})
        if slots["return_segments"]:
            statistics = self.processor.slot_encoder.statistics(passages, row, has_budget=False)
            new |= {"segments": [row.segments], "statistics": [statistics]}
        return new

    def _trace_scored(self, passages: list, slots: dict[str, Any]) -> dict[str, Any]:
        """The `segments` and `statistics` of passages that were scored, as the processor returns them."""
        settings, encoder = {name: slots.get(name) for name in SLOT_SETTINGS}, self.processor.slot_encoder
        (row,) = encoder.encode_batch([passages], **settings, only_segments=True)
        statistics = encoder.statistics(passages, row, settings["max_slots"] is not None)
        return {"segments": [row.segments], "statistics": [statistics]}

    def _prefix_of(self, rows: list[Row]) -> dict[str, Any]:
        """The ids and the cached slots of rows whose passages were scored with the same settings."""
        questions = [question for row in rows for question in row.scored.questions]
        scored = rows[0].scored._replace(questions=questions)
        return dict(self.answerer.cache.prepare_batch(scored, [row.prior for row in rows]))

    def _slots_of(self, rows: list[Row], model_inputs: dict[str, Any]) -> dict[str, Any]:
        """The ids and the slots of rows. Passages that were scored are encoded again: the cache serves a batch only if
        all its rows were scored, with the same settings."""
        encoded, ids = [row.slots for row in rows], []
        for index, (row, mask) in enumerate(zip(rows, model_inputs["attention_mask"].bool(), strict=True)):
            ids.append(model_inputs["input_ids"][index][mask].tolist())
            if row.scored is not None:
                (question,), settings, _ = row.scored
                settings = {name: settings.get(name) for name in SLOT_SETTINGS}
                documents = [passage for spec in question.specs[1:] for passage in spec.passages]
                encoded[index] = self.processor.encode_documents(documents, **settings)
                slots = [self.processor.context_token_id] * len(encoded[index].context_embeds)
                ids[index] = [*question.specs[0].prefix_ids, *slots, *question.suffix_ids]
        inputs = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt") | pad_slots(encoded)
        if any(row.prior is not None for row in rows):
            priors = [[0.0 if row.prior is None else row.prior[number] for number in row.numbers] for row in rows]
            priors = [torch.tensor(prior, dtype=torch.float32, device="cpu") for prior in priors]
            inputs["passage_prior"] = pad_sequence(priors, batch_first=True)
        return {name: tensor.to(model_inputs["input_ids"].device) for name, tensor in inputs.items()}

    def _encode(
        self,
        prompt: str | Chat,
        slots: dict[str, Any],
        template: dict[str, Any],
        return_tensors: str,
        truncation: bool | str | None = None,
        padding: bool | str | None = None,
        max_length: int | None = None,
        tokenizer_encode_kwargs: dict | None = None,
        **generate_kwargs,
    ) -> dict[str, Any]:
        """Run the processor on a chat or, without a chat template, on a question."""
        slots = slots | {"return_tensors": return_tensors}
        options = {"truncation": truncation, "padding": padding, "max_length": max_length}
        options = {name: value for name, value in options.items() if value is not None}
        options |= tokenizer_encode_kwargs or {}
        if isinstance(prompt, str):
            return self.processor(text=prompt, **slots, **options)
        template = template | {"tokenize": True, "return_dict": True, "processor_kwargs": options}
        return self.processor.apply_chat_template(prompt.messages, **template, **slots)

    def _forward(
        self,
        model_inputs: dict,
        return_slots: bool = False,
        min_confidence: float | None = None,
        copy_bonus: float | None = None,
        **generate_kwargs,
    ) -> dict:
        row = model_inputs.pop("row")
        rows = row if isinstance(row, list) else [row]  # a list in a batch
        settings = [None if row.scored is None else row.scored.settings for row in rows]
        if settings[0] is not None and all(other == settings[0] for other in settings):
            slots = self._prefix_of(rows)
        else:
            slots = self._slots_of(rows, model_inputs)
        model_inputs |= {name: slots.pop(name) for name in ("input_ids", "attention_mask")}
        call = self.answerer.answer(
            [row.question for row in rows],
            [row.passages for row in rows],
            copied=[row.copied for row in rows],
            copy_bonus=copy_bonus,
            scores=bool(slots) and (min_confidence is not None or return_slots),
            traces=return_slots,
            min_confidence=min_confidence,
            # All rows with passages have the same.
            tokens_per_slot=next((row.tokens_per_slot for row in rows if row.tokens_per_slot is not None), None),
        )
        outputs = super()._forward(model_inputs, **slots, **call.options(generate_kwargs))
        if call.answerability is not None:
            outputs["answerability"] = call.answerability
        if call.answer_likelihood is not None:
            outputs["answer_likelihood"] = call.answer_likelihood
        if call.recursion_depth is not None:
            outputs["recursion_depth"] = call.recursion_depth
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
            return_type = ReturnType.NEW_TEXT if row.is_question else ReturnType.FULL_TEXT
        answerability, likelihood = (
            model_outputs.pop(name, [None])[0] for name in ("answerability", "answer_likelihood")
        )
        records = super().postprocess(model_outputs, return_type=return_type, **kwargs)
        is_abstention = min_confidence is not None and row.has_slots and answerability < min_confidence
        if is_abstention:
            for record in records:  # a text, or a chat whose last message is the answer
                answer = record["generated_text"]
                if isinstance(answer, str):
                    record["generated_text"] = self.processor.no_answer
                else:
                    answer[-1]["content"] = self.processor.no_answer
        if row.trace is None:
            return records
        statistics, num_slots = row.trace["statistics"], row.trace["statistics"]["slots"]
        if answerability is not None and row.has_slots:
            statistics = statistics | dict.fromkeys(("answerability", "confidence"), answerability.item())
            if likelihood is not None and not is_abstention:
                statistics["answer_likelihood"] = likelihood.item()
        if depth is None:  # the slots were cached, without a step
            depth = torch.zeros(1, self.model.config.text_config.num_hidden_layers, num_slots).long()
        layers = depth[0, :, :num_slots].tolist() if num_slots else []
        trajectories = [[format_trajectory(steps) for steps in layer] for layer in layers]
        trace = {"segments": row.trace["segments"], "trajectories": trajectories, "statistics": statistics}
        return [record | trace for record in records]

    def save_pretrained(self, save_directory: str, **kwargs):
        """Write model, code and processor, so that `pipeline(model=save_directory)` loads them."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.processor.save_pretrained(save_directory)


def _by_document(scores: dict[int, ScoredPassage], spans: list[Segment]) -> dict[int, float]:
    """The highest answerability among the passages of each document; `spans` has the place of each passage."""
    # In a dictionary the last one of a document's passages counts, which is the one with the highest answerability.
    rising = sorted(scores, key=lambda number: scores[number].answerability)
    return {spans[number].document: scores[number].answerability for number in rising}


def _trace_of(encoded: dict, spans: Sequence[Segment], scores: dict[int, float] | None) -> dict[str, Any]:
    """The segments and statistics of an input's slots: `spans` has the place of each passage in its document, `scores`
    the answerability of each document."""
    segments = encoded.get("segments", [[]])[0]
    no_slots = {"tokens": 0, "slots": 0, "compression_rate": None}
    statistics = encoded.get("statistics", [no_slots])[0]
    if scores is not None:
        statistics |= dict.fromkeys(("passage_answerabilities", "passage_confidences"), dict(sorted(scores.items())))
    segments = [asdict(segment.of_document(spans[segment.document])) for segment in segments]
    return {"segments": segments, "statistics": statistics}


def _parse_input(value: Any, documents: list | None) -> tuple[str | Chat, list | None, bool]:
    """The prompt of an input, its documents or `None` for no slots, and whether it is a question."""
    if isinstance(value, dict):
        documents = value.get("documents", documents)
        others = ", ".join(f"`{key}`" for key in value if key not in ("question", "messages", "documents"))
        if documents is None and ("question" in value or (others and "messages" in value)):
            raise ValueError(  # passages under another name would be ignored
                f"An input has no `documents`{others and f', but it has {others}'}. Pass the passages as `documents`, "
                'a list of strings or of {"title": str, "text": str}, or pass an empty list to ask without passages.'
            )
    if isinstance(value, dict) and "messages" in value:
        if not isinstance(value["messages"], list | tuple):
            raise ValueError(
                f'`messages` is {value["messages"]!r}; expected a list of {{"role": str, "content": str}}.'
            )
        return Chat(value["messages"]), documents, False
    if isinstance(value, dict) and isinstance(value.get("question"), str):
        return value["question"], documents, True
    if isinstance(value, str):
        return value, documents, documents is not None
    if isinstance(value, Chat):
        return value, documents, False
    kind = f"of type {type(value).__name__}"
    if isinstance(value, dict):
        keys = (f"`{key}` of type {type(content).__name__}" for key, content in value.items())
        kind = f"a dictionary with {', '.join(keys) or 'no keys'}"
    raise ValueError(
        f'An input is {kind}; expected a chat, a string or {{"question": str, "documents": [...]}}, or a list of '
        "these. Pass a data set as `list(dataset)`."
    )


def format_trajectory(depth: int) -> str:
    """The passes of a slot through a layer, as the paper's case studies write them: one `L` for each pass. `depth` is
    an entry of `recursion_depth`.

    >>> [format_trajectory(depth) for depth in (0, 1, 2)]
    ['L0.', 'LL', 'LLL']
    """
    return "L0." if depth == 0 else "L" * (depth + 1)
