"""The sentence encoder: loaded on first use, an embedding per text or per run of characters, trained along or not."""

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download

from .configuration_arcaligner import missing_model_message, resolve_encoder

# Texts that are read at a time. They are sorted by length: of few, hardly any padding is read.
RUN_BATCH = 16


# Of a checkpoint whose encoder was trained along.
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


class LazyEncoder:
    """The sentence encoder, loaded on first use. Shared, not copied, when a processor is copied or saved.

    With `folder`, a sentence-transformers folder of LoRA weights that were trained along with the aligner, these are
    added to the encoder `name_or_path`.
    """

    def __init__(self, name_or_path: str, folder: str | None = None):
        self.name_or_path = name_or_path
        self.folder = folder
        self.device = None
        self._model = None
        self._reading = None

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # A process that cuts passages asks what the encoder reads; the weights stay where they are.
        return self.__dict__ | {"_model": None, "_reading": self._reading if self._model is None else self.reading}

    @property
    def model(self):
        if self._model is None:
            self._model = self._load()
            for layer in self._lora_layers():
                layer.merge()
        elif self.device is not None and self._model.device != torch.device(self.device):
            self._model.to(self.device)
        return self._model

    def _load(self):
        try:
            sentence_transformers = importlib.import_module("sentence_transformers")
        except ImportError as error:
            raise ImportError(
                "Passages are encoded by sentence-transformers, which is not installed: `pip install "
                "sentence-transformers`. Or pass precomputed `context_embeds`."
            ) from error
        try:
            model = sentence_transformers.SentenceTransformer(
                resolve_encoder(self.name_or_path), device=self.device, model_kwargs={"use_safetensors": True}
            )
        except OSError as error:
            raise OSError(missing_model_message("encoder", self.name_or_path, error)) from error
        if self.folder is not None:
            model.load_adapter(self.folder)
            model.eval().requires_grad_(False)
        return model

    @functools.cached_property
    def untrained(self) -> "LazyEncoder":
        """The encoder as it was before it was trained along."""
        if self.folder is None:
            return self
        encoder = LazyEncoder(self.name_or_path)
        encoder.device = self.device
        return encoder

    def _lora_layers(self) -> list:
        from peft.tuners.lora import LoraLayer  # only an encoder that was trained along needs PEFT

        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def train_along(self, lora_r: int) -> list[torch.nn.Parameter]:
        """Gives the encoder LoRA of rank `lora_r`, or goes on with what it has, and returns its weights, to be trained.

        Raises:
            `ValueError`: LoRA of another rank.
        """
        from peft import LoraConfig

        model = self.model
        if not (layers := self._lora_layers()):
            # A pooler is not read: it would get no gradient.
            config = LoraConfig(
                r=lora_r, lora_alpha=2 * lora_r, target_modules="all-linear", exclude_modules=".*pooler.*"
            )
            model.add_adapter(config)
            layers = self._lora_layers()
        weights = []
        for layer in layers:
            if layer.merged:
                layer.unmerge()
            if (found := layer.r["default"]) != lora_r:
                raise ValueError(f"The encoder has LoRA of rank {found}; got {lora_r}. Go on with the rank it has.")
            layer.cast_input_dtype_enabled = False  # autocast does it, and does not cast all of the input
            weights += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        return weights

    def save(self, folder: Path) -> None:
        """Writes the encoder's LoRA as a sentence-transformers folder, which needs the base encoder only."""
        config = self.model[0].model.peft_config["default"]
        config.base_model_name_or_path = self.name_or_path
        self.model.save(str(folder), create_model_card=False)

    @property
    def reading(self) -> tuple:
        """The most tokens it reads, if there is a limit, and its tokenizer."""
        if self._model is None and self._reading is not None:
            return self._reading
        return self.model.max_seq_length, self.model.tokenizer

    def num_reads(self, text: str) -> int:
        """How many times the most that the encoder reads `text` is, about; 1 where it reads it whole."""
        limit, tokenizer = self.reading
        if limit is None or 2 * len(text) < limit:
            return 1
        # No tokenizer joins so many characters. What is longer is cut first, so that it is tokenized twice at most.
        longest = 16 * limit
        if len(text) > longest:
            return max(2, len(text) // longest)
        return -(-len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) // limit)

    def encode_runs(self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]]) -> torch.Tensor:
        """Late chunking: each text is read once, its token states are averaged over runs of characters.

        Args:
            texts (`Sequence[str]`): What the encoder reads.
            starts (`Sequence[int]`): For each text, the character where its first run begins.
            ends (`Sequence[Sequence[int]]`): For each text, the characters where its runs end, ascending.

        Returns:
            Normalised embeddings (num_runs, encoder_hidden_size) of all texts' runs in order, with a gradient where the
            encoder's weights ask for one. A run without a token of the encoder's own, inside of a long one, has the
            states of that token.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # texts of like length share a batch
        pooled: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for first in range(0, len(order), RUN_BATCH):
            batch = order[first : first + RUN_BATCH]
            states, offsets = self._token_states([texts[number] for number in batch])
            weights = torch.zeros(len(batch), max(len(ends[number]) for number in batch), states.shape[1])
            for row, number in enumerate(batch):
                run_weights = _run_weights(offsets[row], starts[number], np.asarray(ends[number]))
                weights[row, : len(ends[number]), : run_weights.shape[1]] = torch.from_numpy(run_weights)
            means = weights.to(states) @ states  # (texts, max_runs, encoder_hidden_size)
            for row, number in enumerate(batch):
                pooled[number] = means[row, : len(ends[number])]
        return torch.nn.functional.normalize(torch.cat(pooled).float(), dim=-1)

    def encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Normalised embeddings (len(texts), encoder_hidden_size), as [`SentenceTransformer.encode`] makes them, with a
        gradient where the encoder's weights ask for one."""
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        embeds: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for first in range(0, len(order), RUN_BATCH):
            batch = order[first : first + RUN_BATCH]
            features = self.model.preprocess([prompt + texts[number] for number in batch])
            features = {name: each.to(self.model.device) for name, each in features.items() if torch.is_tensor(each)}
            for number, embed in zip(batch, self.model(features)["sentence_embedding"], strict=True):
                embeds[number] = embed
        return torch.nn.functional.normalize(torch.stack(embeds).float(), dim=-1)

    def _token_states(self, texts: list[str]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """States (texts, max_tokens, encoder_hidden_size), and of each text's tokens the characters they stand for,
        (tokens, 2), equal where a token stands for none."""
        transformer = self.model[0]
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""
        limit, tokenizer = self.reading
        read = tokenizer(
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
