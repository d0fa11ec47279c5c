"""What the gates say of the slots after a layer's mandatory pass, and what the layers were given to read."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..modeling_arcaligner import ArcAlignerForCausalLM, SlotDecoderLayer


def decoder_layers(aligner: ArcAlignerForCausalLM) -> list[SlotDecoderLayer]:
    """In their order."""
    return [module for module in aligner.modules() if isinstance(module, SlotDecoderLayer)]


def asked_gates(aligner: ArcAlignerForCausalLM) -> dict[int, nn.Module]:
    """Gates by layer, without the last layer's: no later layer reads its slots."""
    return {layer.layer_idx: layer.slot_gate for layer in decoder_layers(aligner)[:-1] if layer.slot_gate is not None}


@contextmanager
def first_decisions(aligner: ArcAlignerForCausalLM) -> Iterator[dict[int, torch.Tensor]]:
    """
    Inside, one forward of one row notes what the gates say first.

    Yields:
        `dict`: For each layer that is asked probabilities (2, num_slots) of the slots' states as they are, and of
            the same states rounded to bfloat16.
    """
    found: dict[int, torch.Tensor] = {}

    def note(index: int):
        def hook(gate, inputs, prob):
            if index not in found:  # the first of a layer's steps
                rounded = gate.forward(inputs[0].to(torch.bfloat16))
                found[index] = torch.stack([prob[:, 0], rounded[:, 0]]).cpu()

        return hook

    handles = [gate.register_forward_hook(note(index)) for index, gate in asked_gates(aligner).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def layers_read(
    aligner: ArcAlignerForCausalLM, given: list[torch.Tensor] | None = None
) -> Iterator[list[torch.Tensor]]:
    """
    Inside, one forward notes what each layer reads, or each layer reads what it is given.

    Args:
        given (`list[torch.Tensor]`, *optional*): The states (batch, seq_len, hidden) that each layer shall read.

    Yields:
        `list[torch.Tensor]`: The states that each layer reads, in order.
    """
    read: list[torch.Tensor] = []

    def replace(index: int):
        def hook(layer, args):
            states = args[0] if given is None else given[index].to(args[0].dtype)
            read.append(states)
            return (states, *args[1:])

        return hook

    handles = [layer.register_forward_pre_hook(replace(layer.layer_idx)) for layer in decoder_layers(aligner)]
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def spread_gates(aligner: ArcAlignerForCausalLM, inputs: dict[str, torch.Tensor]) -> None:
    """Draws the gates anew, so that over the slots of `inputs` a layer's logits have mean 0 and deviation 1.

    Random weights of a shape have gates far from their threshold, which no rounding moves.
    """
    torch.manual_seed(0)
    handles = []

    def fit(index: int):
        def hook(linear, args):
            handles[index].remove()
            linear.weight.normal_()
            logits = args[0] @ linear.weight.T  # (num_slots, 1)
            linear.weight.div_(logits.std())
            linear.bias.copy_(-(logits.mean() / logits.std()))

        return hook

    for index, gate in enumerate(asked_gates(aligner).values()):
        handles.append(gate.out.register_forward_pre_hook(fit(index)))
    aligner(**inputs, use_cache=False, logits_to_keep=1)
