"""The sentence encoder: loaded on first use, an embedding per text or per run of characters, trained along or not."""

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer

from .configuration_arcaligner import longest_prompt, missing_model_message, resolve_encoder

# Texts per batch on the CPU and elsewhere. They are sorted by length: small batches hold hardly any padding.
CPU_BATCH, DEVICE_BATCH = 8, 64
DTYPES = ("float32", "bfloat16", "auto")
# Folder of a checkpoint, with the encoder that was trained with the aligner.
ENCODER_FOLDER = "encoder"


def find_encoder_folder(checkpoint: str, revision: str | None = None) -> str:
    """The folder `encoder` of a checkpoint, on this machine or on the Hub.

    Raises:
        `ValueError`: a checkpoint without, by its name.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        folder = Path(snapshot_download(checkpoint, revision=revision, allow_patterns=f"{ENCODER_FOLDER}/*"))
    if not (folder / ENCODER_FOLDER / "adapter_config.json").is_file():
        raise ValueError(
            f"{checkpoint} lacks {ENCODER_FOLDER}/adapter_config.json, the sentence encoder that was trained along "
            "with the aligner. Save the processor again, or download the checkpoint again."
        )
    return str(folder / ENCODER_FOLDER)


def _sentence_transformers():
    try:
        return importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise ImportError(
            "Passages are encoded by sentence-transformers, which is not installed: `pip install "
            "sentence-transformers`. Or pass precomputed `context_embeds`."
        ) from error


def _read_tokenizer(name_or_path: str):
    """The tokenizer of an encoder, as sentence-transformers sets it up, without the weights.

    Raises:
        `ValueError`, `OSError`: files of another layout, which sentence-transformers may know.
    """
    settings = _sentence_transformers().sentence_transformer.modules.Transformer.load_config(name_or_path)
    if settings.get("do_lower_case"):
        raise ValueError("sentence-transformers changes the tokenizer")
    options = dict(settings.get("processor_kwargs") or {})
    if settings.get("max_seq_length") is not None:
        options.setdefault("model_max_length", settings["max_seq_length"])
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    most = longest_prompt(AutoConfig.from_pretrained(name_or_path))
    if "model_max_length" not in options and most not in (None, -1):
        tokenizer.model_max_length = min(tokenizer.model_max_length, most)
    return tokenizer


class LazyEncoder:
    """The sentence encoder, loaded on first use. Shared, not copied, when a processor is copied or saved.

    With `folder`, a sentence-transformers folder of LoRA weights that were trained along with the aligner, these are
    added to the encoder `name_or_path`. `dtype` is one of `DTYPES`; `"auto"` is decided on loading.
    """

    def __init__(self, name_or_path: str, folder: str | None = None, dtype: str = "float32"):
        if dtype not in DTYPES:
            raise ValueError(f"`encoder_dtype` is {dtype!r}; expected one of {', '.join(DTYPES)}.")
        self.name_or_path, self.folder, self.dtype = name_or_path, folder, dtype
        self.device = None
        self._model = self._tokenizer = self._untrained = None

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # Another process reads weights and tokenizer itself: it may be a fork, in which torch cannot compute.
        return self.__dict__ | dict.fromkeys(("_model", "_tokenizer", "_untrained"))

    @property
    def model(self):
        """The `SentenceTransformer`."""
        if self._model is None:
            self._model = self._load()
            for layer in self._lora_layers():
                layer.merge()
            if self.dtype == "auto":
                # Without AMX bfloat16 is no faster than float32: measured with AVX-512, with and without its bfloat16.
                has_amx = self._model.device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False)
                self.dtype = "bfloat16" if has_amx else "float32"
            if self.dtype == "bfloat16":
                self.cast(torch.bfloat16)
        elif self.device is not None and self._model.device != torch.device(self.device):
            self._model.to(self.device)
        return self._model

    def _load(self):
        try:
            model = _sentence_transformers().SentenceTransformer(
                resolve_encoder(self.name_or_path), device=self.device, model_kwargs={"use_safetensors": True}
            )
        except OSError as error:
            raise OSError(missing_model_message("encoder", self.name_or_path, error)) from error
        if self.folder is not None:
            model.load_adapter(self.folder)
        return model.eval().requires_grad_(False)

    @property
    def tokenizer(self):
        """The encoder's tokenizer, loaded without the weights; `model_max_length` is the encoder's limit in tokens."""
        if self._model is not None:
            return self._model.tokenizer
        if self._tokenizer is None:
            try:
                self._tokenizer = _read_tokenizer(resolve_encoder(self.name_or_path))
            except (OSError, ValueError):
                self._tokenizer = self.model.tokenizer
        return self._tokenizer

    @property
    def untrained(self) -> "LazyEncoder":
        """The encoder as it was before training."""
        if self.folder is None:
            return self
        if self._untrained is None:
            self._untrained = LazyEncoder(self.name_or_path, dtype=self.dtype)
        self._untrained.device = self.device
        return self._untrained

    def _lora_layers(self) -> list:
        from peft.tuners.lora import LoraLayer  # only an encoder that was trained along needs PEFT

        return [module for module in self.model.modules() if isinstance(module, LoraLayer)]

    def lora_weights(self) -> list[torch.nn.Parameter]:
        """The LoRA weights; empty for an encoder that was not trained."""
        return [each["default"].weight for layer in self._lora_layers() for each in (layer.lora_A, layer.lora_B)]

    def train_along(self, lora_r: int) -> list[torch.nn.Parameter]:
        """Adds LoRA of rank `lora_r`, unless the encoder has it, and returns the LoRA weights, ready to be trained.

        Raises:
            `ValueError`: LoRA of another rank.
        """
        from peft import LoraConfig

        if self.dtype != "float32":  # what LoRA was added to is rounded, and would not become what it was
            self.dtype, self._model = "float32", None
        if not self._lora_layers():
            # A pooler is not read: it would get no gradient.
            config = LoraConfig(
                r=lora_r, lora_alpha=2 * lora_r, target_modules="all-linear", exclude_modules=".*pooler.*"
            )
            self.model.add_adapter(config)
        for layer in self._lora_layers():
            if layer.merged:
                layer.unmerge()
            if (found := layer.r["default"]) != lora_r:
                raise ValueError(f"The encoder has LoRA of rank {found}; got {lora_r}. Go on with the rank it has.")
            layer.cast_input_dtype_enabled = False  # autocast does it, and does not cast all of the input
        self.model.requires_grad_(False)
        weights = self.lora_weights()
        for weight in weights:
            weight.requires_grad_(True)
        return weights

    def cast(self, dtype: torch.dtype, lora_dtype: torch.dtype = torch.float32) -> None:
        """Casts the encoder to `dtype` and its LoRA to `lora_dtype`: in bfloat16 small updates would be lost."""
        weights = [(weight, weight.data) for weight in self.lora_weights()]
        self.model.to(dtype)
        for weight, values in weights:
            weight.data = values.to(weight.device, lora_dtype)

    def save(self, folder: Path) -> None:
        """Writes the encoder's LoRA as a sentence-transformers folder, which needs the base encoder only."""
        config = self.model[0].model.peft_config["default"]
        config.base_model_name_or_path = self.name_or_path
        self.model.save(str(folder), create_model_card=False)

    def num_reads(self, text: str) -> int:
        """How many pieces `text` needs so that the encoder reads all of it, about; 1 if it fits."""
        limit = self.tokenizer.model_max_length
        if limit is None or 2 * len(text) < limit:
            return 1
        # No tokenizer joins so many characters. What is longer is cut first, so that it is tokenized twice at most.
        longest = 16 * limit
        if len(text) > longest:
            return max(2, len(text) // longest)
        return -(-len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"]) // limit)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Normalized embeddings (len(texts), encoder_hidden_size), float32 on the CPU, without a gradient."""
        return self.encode_runs(texts, (), None).cpu() if len(texts) else torch.empty(0)

    def encode_runs(
        self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None
    ) -> torch.Tensor:
        """Late chunking: each text is encoded once, and its token states are averaged over runs of characters.

        Args:
            texts (`Sequence[str]`): What the encoder reads.
            starts (`Sequence[int]`): For each text, the character where its first run begins.
            ends (`Sequence[Sequence[int]]`, *optional*): For each text, the characters where its runs end, ascending.
                `None` gives an embedding per text, as `encode` does.

        Returns:
            Normalized embeddings (num_runs, encoder_hidden_size) of all texts' runs in order, with a gradient where the
            encoder's weights ask for one. A run without a token of the encoder's own, inside of a long one, has the
            states of that token.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # texts of like length share a batch
        pooled: list[torch.Tensor] = [torch.empty(0)] * len(texts)  # each (num_runs, encoder_hidden_size)
        size = CPU_BATCH if self.model.device.type == "cpu" else DEVICE_BATCH
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            some = [texts[number] for number in batch]
            if ends is None:
                found = self._text_embeds(some)[:, None]
            else:
                found = self._run_means(some, [starts[n] for n in batch], [np.asarray(ends[n]) for n in batch])
            for number, embeds in zip(batch, found, strict=True):
                pooled[number] = embeds
        return torch.nn.functional.normalize(torch.cat(pooled).float(), dim=-1)

    @property
    def _prompt(self) -> str:
        return self.model.prompts.get(self.model.default_prompt_name) or ""

    def _text_embeds(self, texts: list[str]) -> torch.Tensor:
        """Embeddings (texts, encoder_hidden_size) of all of the encoder's modules."""
        features = self.model.preprocess([self._prompt + text for text in texts])
        features = {name: each.to(self.model.device) for name, each in features.items() if torch.is_tensor(each)}
        return self.model(features)["sentence_embedding"]

    def _run_means(self, texts: list[str], starts: list[int], ends: list[np.ndarray]) -> list[torch.Tensor]:
        """For each text the means (num_runs, encoder_hidden_size) of its runs' token states."""
        states, offsets = self._token_states(texts)
        weights = torch.zeros(len(texts), max(map(len, ends)), states.shape[1])
        for row, own in enumerate(map(_run_weights, offsets, starts, ends)):
            weights[row, : own.shape[0], : own.shape[1]] = torch.from_numpy(own)
        means = weights.to(states.device) @ states.float()  # (texts, max_runs, encoder_hidden_size)
        return [of_text[: len(own)] for of_text, own in zip(means, ends, strict=True)]

    def _token_states(self, texts: list[str]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """States (texts, max_tokens, encoder_hidden_size), and of each text's tokens the characters they stand for,
        (tokens, 2), equal where a token stands for none."""
        transformer, prompt, limit = self.model[0], self._prompt, self.model.max_seq_length
        read = self.model.tokenizer(
            [prompt + text for text in texts],
            truncation=limit is not None,
            max_length=limit,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets, lengths = read.pop("offset_mapping").numpy() - len(prompt), read["attention_mask"].sum(dim=1).tolist()
        device = next(transformer.parameters()).device
        states = transformer({name: tensor.to(device) for name, tensor in read.items()})["token_embeddings"]
        return states, [row[:length] for row, length in zip(offsets, lengths, strict=True)]


def _run_weights(offsets: np.ndarray, start: int, ends: np.ndarray) -> np.ndarray:
    """Weights (num_runs, tokens) that average the tokens at `offsets` (tokens, 2) whose middle lies in each run."""
    middles = offsets.sum(axis=1) / 2
    is_own = (offsets[:, 1] > offsets[:, 0]) & (middles > start)
    weights = np.zeros((len(ends), len(offsets)), dtype=np.float32)
    run_of_token = np.minimum(np.searchsorted(ends, middles), len(ends) - 1)
    weights[run_of_token[is_own], is_own.nonzero()[0]] = 1.0
    run_middles = (np.concatenate([[start], ends[:-1]]) + ends) / 2
    for run in (weights.sum(axis=1) == 0).nonzero()[0]:
        weights[run, np.abs(middles - run_middles[run]).argmin()] = 1.0
    return weights / weights.sum(axis=1, keepdims=True)
