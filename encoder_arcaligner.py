"""The sentence encoder of a processor, by name: loaded on first use, and asked what it reads whole."""

import importlib
from collections.abc import Sequence

import numpy as np
import torch

from .defaults_arcaligner import missing_model_error, resolve_encoder

# Texts whose token states exist at a time.
RUN_BATCH = 64


class LazyEncoder:
    """The sentence encoder, loaded on first use. Shared, not copied, when a processor is copied or saved."""

    def __init__(self, name_or_path: str):
        self.name_or_path = name_or_path
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
            try:
                sentence_transformers = importlib.import_module("sentence_transformers")
            except ImportError as error:
                raise ImportError(
                    "Passages are encoded by sentence-transformers, which is not installed: `pip install "
                    "sentence-transformers`. Or pass precomputed `context_embeds`."
                ) from error
            try:
                self._model = sentence_transformers.SentenceTransformer(
                    resolve_encoder(self.name_or_path), device=self.device
                )
            except OSError as error:
                raise OSError(missing_model_error("encoder", self.name_or_path, error)) from error
        elif self.device is not None:
            self._model.to(self.device)
        return self._model

    @property
    def reading(self) -> tuple:
        """The most tokens it reads, if there is a limit, and its tokenizer."""
        if self._model is None and self._reading is not None:
            return self._reading
        return self.model.max_seq_length, self.model.tokenizer

    def fits(self, text: str) -> bool:
        """Whether the encoder reads `text` whole."""
        limit, tokenizer = self.reading
        if limit is None or 2 * len(text) < limit:
            return True
        # Characters that no tokenizer would join bound the work on a huge "sentence".
        if len(text) > 40 * limit:
            return False
        return len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) <= limit

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
