"""The encoder of training segments on all accelerators of this machine, and what tells one encoder from another."""

from typing import Any

import numpy as np
import torch

from ..processing_arcaligner import ArcAlignerProcessor

# Fewer texts are not worth the start of a process for each device.
MIN_TEXTS_OF_A_POOL = 512


def encoder_settings(processor: ArcAlignerProcessor) -> dict[str, Any]:
    """What decides an embedding besides the weights, as JSON.

    Returns:
        `dict` with `modules` (names of the encoder's steps), `max_seq_length` (tokens it reads), `prompt` (text it puts
        before a segment, if any) and `normalize_embeddings`.
    """
    encoder = processor.sentence_encoder
    return {
        "modules": [type(module).__name__ for module in encoder],
        "max_seq_length": encoder.max_seq_length,
        "prompt": encoder.prompts.get(encoder.default_prompt_name),
        "normalize_embeddings": True,
    }


def all_accelerators() -> list[str]:
    """Devices of this machine, such as `["cuda:0", "cuda:1"]`; none on a CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    return [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


class DevicePool:
    """
    Encodes segments on several devices, each with its own process and copy of the encoder; with fewer than two devices,
    or a few texts, in this process. A context manager: the processes end with it.

    Args:
        processor ([`ArcAlignerProcessor`]): Whose encoder.
        devices (`list[str]`): Where; see [`all_accelerators`].

    Example:

    ```python
    >>> with DevicePool(processor, all_accelerators()) as encode:
    ...     store = EmbeddingStore("cache", "all-MiniLM-L6-v2", 384, encode)
    ```
    """

    def __init__(self, processor: ArcAlignerProcessor, devices: list[str]):
        self.processor = processor
        self.devices = devices
        self._pool = None

    def __enter__(self) -> "DevicePool":
        return self

    def __exit__(self, *exception) -> None:
        if self._pool is not None:
            self.processor.sentence_encoder.stop_multi_process_pool(self._pool)
            self._pool = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Normalised embeddings, float32 (num_texts, encoder_hidden_size), in the order of `texts`."""
        if self._pool is None and len(self.devices) > 1 and len(texts) >= MIN_TEXTS_OF_A_POOL:
            self._pool = self.processor.sentence_encoder.start_multi_process_pool(self.devices)
        return self.processor.encode_segments(texts, pool=self._pool).numpy()
