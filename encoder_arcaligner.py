"""The sentence encoder of a processor, by name: loaded on first use, and asked what it reads whole."""

import importlib

from .defaults_arcaligner import missing_model_error, resolve_encoder


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
