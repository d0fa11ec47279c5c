"""Slot prefixes that are kept, so that passages asked about again are not read again.

    questions, passages -> fingerprints -> prefixes (in memory, in files, or prefilled) -> one batch -> `generate`

Slots come before the question and do not depend on it, and after them every layer is that of the unmodified base
model. So the keys and values of a prompt up to its last slot are all that a question about these passages needs, and a
backbone that knows nothing of slots continues from them with the same logits. In any engine with a cache:

    cache = DynamicCache(config=backbone.config)  # backbone = AutoModelForCausalLM.from_pretrained(base_model)
    with safe_open(path, framework="pt") as file:
        for layer in range(backbone.config.num_hidden_layers):
            cache.update(file.get_tensor(f"layers.{layer}.keys"), file.get_tensor(f"layers.{layer}.values"), layer)
    logits = backbone(input_ids=ids_after_the_slots, past_key_values=cache).logits

Shapes: keys and values (batch, key_value_heads, length, head_dim), rows of a batch left-padded.
"""

import hashlib
import json
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from .configuration_arcaligner import REFINEMENT_SETTINGS, SLOT_SETTINGS, check_length, longest_prompt
from .encoder_arcaligner import GivenSlots, pad_words
from .fingerprint_arcaligner import (
    PREFIX_SETTINGS,
    WatchedWeights,
    canonical_settings,
    slot_prefix_fingerprint,
    spacy_version,
    tensors_digest,
)

FORMAT = "arcaligner-slot-prefix-2"


def save_slot_prefix(path: str | Path, cache: Cache, fingerprint: dict[str, Any]) -> None:
    """Writes a slot prefix as safetensors, whole or not at all.

    Args:
        path (`str` or `Path`): File to write; its folder exists.
        cache ([`~transformers.Cache`]): Keys and values of one row, such as `prefill_context` returns.
        fingerprint (`dict`): What `slot_prefix_fingerprint` returns.

    Raises:
        `ValueError`: a cache of several rows.
    """
    if (num_rows := cache.layers[0].keys.shape[0]) != 1:
        raise ValueError(f"The cache has {num_rows} rows; a file holds the prefix of one. Save each by itself.")
    path, length = Path(path), cache.get_seq_length()
    tensors = {}
    for layer_idx, layer in enumerate(cache.layers):
        # A sliding window has dropped the first positions; zeros, which it never reads, keep the rest in place.
        tensors[f"layers.{layer_idx}.keys"] = _left_pad(layer.keys, length).contiguous()
        tensors[f"layers.{layer_idx}.values"] = _left_pad(layer.values, length).contiguous()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        metadata = {"format": FORMAT, "fingerprint": json.dumps(fingerprint), "payload": tensors_digest(tensors)}
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_slot_prefix(
    path: str | Path, fingerprint: dict[str, Any], config: PreTrainedConfig, device: str | torch.device = "cpu"
) -> DynamicCache:
    """Reads a slot prefix that `save_slot_prefix` wrote.

    Args:
        path (`str` or `Path`): The file.
        fingerprint (`dict`): `slot_prefix_fingerprint` of the model, passages and prompt it will be used with.
        config (`PreTrainedConfig`): The backbone's, `model.config.text_config`.
        device (`str` or `torch.device`, defaults to `"cpu"`): Where the model is.

    Raises:
        `ValueError`: a file that is broken or no slot prefix, one with another fingerprint (the first field that
            differs is named), or one that does not fit the backbone.
    """
    advice = "Use what it was made with, or delete the file to make a new one."
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}; expected {FORMAT!r}")
        if metadata.get("payload") != tensors_digest(tensors):
            raise ValueError("its keys and values are not those that were saved")
        if not isinstance(found := json.loads(metadata.get("fingerprint", "")), dict):
            raise ValueError(f"its fingerprint is a {type(found).__name__}; expected an object")
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete the file to make a new one.") from error
    for field in [*fingerprint, *found]:
        if found.get(field) != fingerprint.get(field):
            raise ValueError(
                f"The slot prefix {path} was made with `{field}` {found.get(field)!r}; expected "
                f"{fingerprint.get(field)!r}. {advice}"
            )
    _check_shapes(path, tensors, config)
    cache = DynamicCache(config=config)
    for layer_idx in range(config.num_hidden_layers):
        keys, values = (tensors[f"layers.{layer_idx}.{kind}"].to(device) for kind in ("keys", "values"))
        cache.update(keys, values, layer_idx)
    return cache


def _check_shapes(path: str | Path, tensors: dict[str, torch.Tensor], config: PreTrainedConfig) -> None:
    names = {f"layers.{i}.{kind}" for i in range(config.num_hidden_layers) for kind in ("keys", "values")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    length = max((shape[2] for shape in shapes if len(shape) == 4), default=0)
    if tensors.keys() != names or shapes != {(1, config.num_key_value_heads, length, head_dim)}:
        raise ValueError(
            f"{path} holds {len(tensors)} tensors of shapes {sorted(shapes)}; the backbone {config.model_type} needs "
            f"keys and values of {config.num_hidden_layers} layers, each of shape (1, {config.num_key_value_heads}, "
            f"length, {head_dim}). Load it with the backbone it was made for."
        )
    check_length(length, f"The slot prefix {path}", config)


def _left_pad(states: torch.Tensor, length: int) -> torch.Tensor:
    return pad(states, (0, 0, length - states.shape[2], 0))


def join_slot_prefixes(prefixes: Sequence[Cache], config: PreTrainedConfig) -> tuple[DynamicCache, torch.LongTensor]:
    """Joins caches of one row to a left-padded cache, and returns it with its attention mask (batch, length).

    The rows are copied: generating from the batch leaves the prefixes as they are. A row's positions are those it has
    alone, so what follows needs `position_ids` counted over the mask, as `generate` does.

    Raises:
        `ValueError`: prefixes of several dtypes or on several devices.
    """
    kinds = {(prefix.layers[0].keys.dtype, prefix.layers[0].keys.device) for prefix in prefixes}
    if len(kinds) != 1:
        described = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"The slot prefixes are {described}; expected one dtype and device. Load them alike.")
    lengths = torch.tensor([prefix.get_seq_length() for prefix in prefixes])
    length = int(lengths.max())
    joined = DynamicCache(config=config)
    for layer_idx in range(config.num_hidden_layers):
        layers = [prefix.layers[layer_idx] for prefix in prefixes]
        keys = torch.cat([_left_pad(layer.keys, length) for layer in layers])
        values = torch.cat([_left_pad(layer.values, length) for layer in layers])
        joined.update(keys, values, layer_idx)
    mask = (torch.arange(length) >= length - lengths[:, None]).long()
    return joined, mask.to(prefixes[0].layers[0].keys.device)


def split_slot_prefixes(cache: Cache, lengths: Sequence[int], config: PreTrainedConfig) -> list[DynamicCache]:
    """Splits a left-padded cache into one cache per row, of `lengths` positions each, with memory of its own."""
    prefixes = []
    for row, length in enumerate(lengths):
        prefix = DynamicCache(config=config)
        for layer_idx, layer in enumerate(cache.layers):
            keys, values = (_left_pad(kept[row : row + 1, :, -length:], length) for kept in (layer.keys, layer.values))
            prefix.update(keys, values, layer_idx)
        prefixes.append(prefix)
    return prefixes


class Prepared(dict):
    """The inputs of `generate`. Attributes: for each question `num_passages`, what is kept apart (here one, as the
    passages of a question are read jointly), and `num_kept`, how much of it did not have to be read."""

    num_passages: list[int]
    num_kept: list[int]


class SlotPrefixStore:
    """
    Keeps slot prefixes of passages for further questions; the least recently used are dropped first.

    Gates, number of slots, segmentation, and the weights of model and encoder may change between two calls, in any
    way that `WatchedWeights` sees: a prefix is used only with what it was made with. A tokenizer or a spaCy
    pipeline that is changed in place is not noticed: make a new store then. A copy of a store starts empty.

    Args:
        model ([`ArcAlignerForCausalLM`]): In evaluation mode.
        processor ([`ArcAlignerProcessor`]): The model's.
        max_bytes (`int`, defaults to 1 GiB): Memory for keys and values; 0 keeps none there.
        folder (`str` or `Path`, *optional*): Where every prefix is written and looked for, also by other processes.

    Attributes: `hits`, `loads` and `misses` count prefixes found in memory, read from the folder and prefilled; `bytes`
    are in use.

    Example:

    ```python
    >>> store = model.slot_prefix_store(processor, folder="prefixes")
    >>> inputs = store.prepare(["Who wrote it?", "When?"], documents=[passages, passages])
    >>> answers = model.generate(**inputs, max_new_tokens=16)
    >>> processor.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ```
    """

    def __init__(self, model, processor, max_bytes: int = 2**30, folder: str | Path | None = None):
        if max_bytes < 0:
            raise ValueError(f"`max_bytes` is {max_bytes}; expected 0 (keep nothing in memory) or more.")
        self.model, self.processor, self.max_bytes = model, processor, max_bytes
        self.folder = None if folder is None else Path(folder)
        self.hits = self.loads = self.misses = self.bytes = 0
        self._prefixes: OrderedDict[str, DynamicCache] = OrderedDict()  # least recently used first
        part_of = {True: "aligner_weights", False: "backbone_weights"}
        self._watched = WatchedWeights(model, lambda name: part_of[model.is_aligner_key(name)])
        self._encoder: WatchedWeights | None = None
        self._tokenizers = {}  # what was read of each, by its id
        self._lock = threading.Lock()

    def __getstate__(self):
        return {name: self.__dict__[name] for name in ("model", "processor", "max_bytes", "folder")}

    def __setstate__(self, state):
        self.__init__(**state)

    def __len__(self) -> int:
        return len(self._prefixes)

    @torch.no_grad()
    def prepare(self, questions, documents=None, *, context_embeds=None, context_word_ids=None, **kwargs) -> Prepared:
        """The inputs of `generate` for questions about passages. Prefixes that are not kept yet are prefilled together,
        equal ones once.

        Args:
            questions (`str`, chat, or a list of them): With slots before the first user message.
            documents (`list`, *optional*): Passages, as the processor takes them; a list for each of several questions.
            context_embeds (tensor or a list, *optional*): Instead, embeddings (num_slots, encoder_hidden_size).
            context_word_ids (tensor or a list, *optional*): Their words (num_slots, max_words), where they are read.
            kwargs: How slots are chosen and refined, as for the processor and `generate`: `max_slots`, `slot_policy`,
                `gate_mode`, `gate_threshold`, `max_refinement_steps`, `refinement_budget`; each combination has its
                own prefixes. The rest is for the chat template; `add_generation_prompt` is on.

        Returns:
            [`Prepared`], a `dict` with `input_ids`, `attention_mask` (batch, seq_len) and `past_key_values`. For beams
            or several answers to a question, call `past_key_values.batch_repeat_interleave(n)` first.

        Raises:
            `ValueError`: as the processor; a file that cannot be used; prompts longer than the backbone's context; no
                question.
        """
        if not isinstance(questions, str | list | tuple) or not questions:
            raise ValueError(f"There is no question in {questions!r}. Pass one, or a list of some.")
        is_single = isinstance(questions, str) or isinstance(questions[0], dict)
        rows = [questions] if is_single else list(questions)
        passages = self.processor.read_passages(documents, context_embeds, context_word_ids, is_single, len(rows))
        settings, template_kwargs = _split_settings(self.processor, kwargs)
        heads, tails = zip(*(self.processor.prompt_ids(row, **template_kwargs) for row in rows), strict=True)
        prefixes, num_kept = self._fetch(heads, passages, settings)
        config, slot_id = self.model.config.text_config, self.processor.context_token_id
        ids = [
            head + [slot_id] * (prefix.get_seq_length() - len(head))
            for head, prefix in zip(heads, prefixes, strict=True)
        ]
        longest = max(len(before) + len(after) for before, after in zip(ids, tails, strict=True))
        check_length(longest, "The prompt", config)
        if any(prefixes[0].is_sliding):
            ids, tails, prefixes = self._align_tails(ids, tails, prefixes)
        cache, prefix_mask = join_slot_prefixes(prefixes, config)
        before, after = self._left_padded(ids), self._left_padded(tails)
        after_mask = self._left_padded([[1] * len(tail) for tail in tails], padding_value=0)
        inputs = Prepared(
            input_ids=torch.cat([before, after], dim=1),
            attention_mask=torch.cat([prefix_mask.to(after_mask.device), after_mask], dim=1),
            past_key_values=cache,
        )
        inputs.num_passages, inputs.num_kept = [1] * len(rows), num_kept
        return inputs

    # Ids to a batch

    def _left_padded(self, rows: list[list[int]], padding_value: int | None = None) -> torch.LongTensor:
        if padding_value is None:
            padding_value = self.processor.tokenizer.pad_token_id or 0  # masked, so any id does
        rows = [torch.tensor(row) for row in rows]
        padded = pad_sequence(rows, batch_first=True, padding_value=padding_value, padding_side="left")
        return padded.to(self.model.device)

    def _align_tails(self, ids, tails, prefixes) -> tuple[list[list[int]], list[list[int]], list[Cache]]:
        """Makes tails equally long: the beginning of a longer one is read with its prefix.

        Padding between a prefix and its question would push the prefix out of a sliding window, which counts columns.
        """
        shortest = min(len(tail) for tail in tails)
        extended = []
        for tail, prefix in zip(tails, prefixes, strict=True):
            if len(tail) > shortest:
                prefix, _ = join_slot_prefixes([prefix], self.model.config.text_config)
                new = torch.tensor([tail[:-shortest]], device=self.model.device)
                self.model.model(input_ids=new, past_key_values=prefix, use_cache=True)
            extended.append(prefix)
        ids = [before + tail[:-shortest] for before, tail in zip(ids, tails, strict=True)]
        return ids, [tail[-shortest:] for tail in tails], extended

    # Passages to prefixes

    def _fetch(self, heads: list[list[int]], passages: list, settings: dict[str, Any]) -> tuple[list[Cache], list[int]]:
        """The prefix of each row, kept or prefilled now, and whether it was kept. The store owns them: copy before
        use."""
        found: dict[str, Cache] = {}
        missing: dict[str, int] = {}  # key to the first row that needs it
        with self._lock:
            weights = self.weights(passages[0])
            prints = [
                slot_prefix_fingerprint(self.model, self.processor, head, row, weights, settings)
                for head, row in zip(heads, passages, strict=True)
            ]
            keys = [hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in prints]
            for row, key in enumerate(keys):
                if key in found or key in missing:
                    self.hits += 1
                elif (prefix := self._find(key, prints[row])) is not None:
                    found[key] = prefix
                else:
                    missing[key] = row
            if missing:
                self.misses += len(missing)
                rows = missing.values()
                made = self._prefill([heads[row] for row in rows], [passages[row] for row in rows], settings)
                found |= zip(missing, made, strict=True)
                if self.weights(passages[0]) == weights:  # nobody wrote to them meanwhile
                    for key, row in missing.items():
                        if self.folder is not None:
                            self.folder.mkdir(parents=True, exist_ok=True)
                            save_slot_prefix(self._path(key), found[key], prints[row])
                        self._keep(key, found[key])
        return [found[key] for key in keys], [int(key not in missing) for key in keys]

    def weights(self, passages: Sequence | tuple) -> dict[str, Any]:
        """Digests of the model and, unless `passages` are embeddings, of encoder and tokenizers."""
        weights, processor = self._watched.digests(), self.processor
        if isinstance(passages, GivenSlots):
            return weights
        encoder = processor.encoder.model
        if self._encoder is None or self._encoder.module is not encoder:
            self._encoder = WatchedWeights(encoder, lambda name: "encoder_weights")
        return {
            **weights,
            **self._encoder.digests(),
            "encoder_reads": [encoder.max_seq_length, encoder.prompts, encoder.default_prompt_name],
            "tokenizers": [self._tokenizer_digest(each) for each in (encoder.tokenizer, processor.tokenizer)],
            "spacy": spacy_version(),
        }

    def _tokenizer_digest(self, tokenizer) -> str:
        known, size, found = self._tokenizers.get(id(tokenizer), (None, 0, ""))
        if known is not tokenizer or size != len(tokenizer):
            found = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
            self._tokenizers[id(tokenizer)] = tokenizer, len(tokenizer), found
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _find(self, key: str, fingerprint: dict[str, Any]) -> Cache | None:
        if key in self._prefixes:
            self.hits += 1
            self._prefixes.move_to_end(key)
            return self._prefixes[key]
        if self.folder is None or not self._path(key).exists():
            return None
        prefix = load_slot_prefix(self._path(key), fingerprint, self.model.config.text_config, self.model.device)
        self.loads += 1
        self._keep(key, prefix)
        return prefix

    def _prefill(self, heads: list[list[int]], passages: list, settings: dict[str, Any]) -> list[DynamicCache]:
        if self.model.training:
            raise ValueError("The model is in training mode, where dropout changes slots. Call `model.eval()` first.")
        gates = {each: value for each, value in settings.items() if each in REFINEMENT_SETTINGS}
        slot_settings = {each: value for each, value in settings.items() if each not in REFINEMENT_SETTINGS}
        longest = longest_prompt(self.model.config.text_config)
        room = longest and [longest - len(head) for head in heads]
        rows = self.processor.encode_batch(passages, **slot_settings, room=room)
        ids = [
            head + [self.processor.context_token_id] * len(row.context_embeds)
            for head, row in zip(heads, rows, strict=True)
        ]
        words = [row.context_word_ids for row in rows]
        mask = self._left_padded([[1] * len(row) for row in ids], padding_value=0)
        device = self.model.device
        cache = self.model.prefill_context(
            self._left_padded(ids),
            pad_sequence([row.context_embeds for row in rows], batch_first=True).to(device),
            mask,
            None if words[0] is None else pad_words(words).to(device),
            **gates,
        )
        return split_slot_prefixes(cache, [len(row) for row in ids], self.model.config.text_config)

    def _keep(self, key: str, prefix: Cache) -> None:
        """Keeps a prefix as the most recently used, unless it is larger than the budget."""
        size = _num_bytes(prefix)
        if size > self.max_bytes:
            return
        while self.bytes + size > self.max_bytes:
            _, oldest = self._prefixes.popitem(last=False)
            self.bytes -= _num_bytes(oldest)
        self._prefixes[key] = prefix
        self.bytes += size


def _num_bytes(cache: Cache) -> int:
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def _split_settings(processor, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of slots and gates, checked, and what is left of `kwargs` for the chat template."""
    given = {name: kwargs[name] for name in SLOT_SETTINGS if kwargs.get(name) is not None}
    processor.check_slot_settings(**given)
    settings = {name: value for name, value in kwargs.items() if name in PREFIX_SETTINGS}
    rest = {name: value for name, value in kwargs.items() if name not in PREFIX_SETTINGS}
    return canonical_settings(settings), rest
