"""How deep each layer refined, handed from the layers to the model's output.

Layers return hidden states only. While a forward records, they leave their depths here, per thread; a layer that
gradient checkpointing runs again in the backward pass finds no recording and leaves nothing.
"""

import threading

import torch


class _Recording(threading.local):
    depths: dict[int, torch.Tensor] | None = None

    def start(self) -> dict[int, torch.Tensor]:
        """Begins a recording; the returned dictionary fills with layer index -> (batch, max_slots)."""
        self.depths = {}
        return self.depths

    def stop(self) -> None:
        self.depths = None

    def add(self, layer_idx: int, depth: torch.Tensor) -> None:
        """Notes the refinement steps taken at a layer, (batch, max_slots)."""
        if self.depths is not None:
            self.depths[layer_idx] = depth


recording_depths = _Recording()
