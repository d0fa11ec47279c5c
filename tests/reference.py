"""The paper's Eq. 1-10 and Algorithm 1, written plainly, to compare the model with.

Nothing of the model's code computes here, only its weights are used: a stock `transformers` model runs the frozen
layers on the whole sequence, every refinement step included; there is no cache, no padding (one row at a time) and no
early stop.

    stock linear        y = W x + M_r * s * B A x                               Eq. 3, through patched `forward`s
    after each layer    a hook refines the slot rows T times                    Eq. 5-9, Algorithm 1 lines 3-15

Use: `Reference(model)(row.input_ids, row.context_embeds, training=True)`.
"""

import copy
import random
from dataclasses import dataclass, field

import torch
from tiny_models import VOCAB_SIZE, collate, for_generate, random_rows, tiny_aligner
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@dataclass
class ReferenceOutput:
    """Outputs for one row; `layers` has `H^(l,0)` before each layer and after the last one."""

    logits: torch.Tensor  # (length, vocab_size)
    recursion_depth: torch.Tensor  # (num_layers, num_slots)
    slot_embeds: torch.Tensor  # (num_slots, hidden): Eq. 1
    layers: list[torch.Tensor] = field(default_factory=list)  # each (length, hidden)
    gate_probs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (layer, step) -> (num_slots,)


class Reference:
    """Algorithm 1 on the weights of an `ArcAlignerForCausalLM`, in float64.

    `weights` holds the aligner's parameters by their names in the model's state dict, as leaves that take gradients.
    The steps of the last layer, which no text position can see, are taken in training and where a row ends in a slot.
    """

    def __init__(self, model: nn.Module):
        self.config = model.config
        state = {name: value.detach().double().clone() for name, value in model.state_dict().items()}
        self.weights = {
            name: state.pop(name).requires_grad_()
            for name in list(state)
            if ".lora_A." in name or ".lora_B." in name or ".slot_gate." in name or ".projector." in name
        }
        self.stock = stock_model(model, torch.float64)
        self.layers = self.stock.get_decoder().layers
        self.slot_mask = None  # (length, 1): M_r of the row that is being computed
        self._patch_linears()
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index), with_kwargs=True)

    def __call__(
        self, input_ids: torch.Tensor, context_embeds: torch.Tensor, *, training: bool = False, passages=None
    ) -> ReferenceOutput:
        """One row: ids `(length,)`, context embeddings `(num_slots, encoder_hidden_size)`; with `passages`, the number
        of the passage of each slot, passages are independent."""
        is_slot = input_ids == self.config.context_token_id
        assert is_slot.sum() == len(context_embeds)
        self.slot_mask = is_slot[:, None].double()
        self.training = training
        self.takes_last_steps = training or bool(is_slot[-1])
        slot_embeds = self._two_linears("model.projector", functional.gelu, context_embeds.double())  # Eq. 1
        depth = torch.zeros(len(self.layers), len(context_embeds), dtype=torch.long)
        self.output = ReferenceOutput(logits=None, recursion_depth=depth, slot_embeds=slot_embeds)
        words = self.stock.get_input_embeddings()(input_ids.masked_fill(is_slot, 0))
        rows = [slot_embeds[is_slot[:i].sum()] if is_slot[i] else words[i] for i in range(len(input_ids))]  # Eq. 2
        independent = {} if passages is None else single_passages(is_slot.tolist(), list(passages))
        self.later_text, self.moved = None, None
        if passages is not None and self.config.passage_alignment == "end":
            positions = independent["position_ids"] + moves_of_slots(is_slot.tolist(), list(passages))
            self.later_text = ~is_slot & (is_slot.cumsum(0) > 0)
            self.moved = self.stock.get_decoder().rotary_emb(torch.stack(rows)[None], positions)
        self.output.logits = self.stock(inputs_embeds=torch.stack(rows)[None], use_cache=False, **independent).logits[0]
        return self.output

    def loss(self, rows: list, num_items: int | None = None, passages=None) -> torch.Tensor:
        """Eq. 10 in training mode: the NLL of all labeled tokens, divided by their number or by `num_items`."""
        total, count = 0.0, 0
        for row, of_row in zip(rows, passages or [None] * len(rows), strict=True):
            logits = self(row.input_ids, row.context_embeds, training=True, passages=of_row).logits
            for i in range(1, len(row.labels)):
                if row.labels[i] >= 0:
                    total = total - logits[i - 1].log_softmax(-1)[row.labels[i]]
                    count += 1
        return total / (count if num_items is None else num_items)

    def gate_prob(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Eq. 5: `(num_slots, hidden)` to `(num_slots, 1)`."""
        score = self._two_linears(f"model.backbone.layers.{layer}.slot_gate", functional.silu, slots)
        return 1 / (1 + torch.exp(-score))

    def _two_linears(self, name: str, activation, x: torch.Tensor) -> torch.Tensor:
        weights = [self.weights[f"{name}.{part}"] for part in ("up.weight", "up.bias", "out.weight", "out.bias")]
        return activation(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]

    def refine(self, layer: int, hidden: torch.Tensor, apply_layer) -> torch.Tensor:
        """Algorithm 1, lines 3 to 15, for one layer: `H^(l+1,0)` `(length, hidden)` to `H^(l+1,T)`."""
        mandatory, is_slot = hidden, self.slot_mask[:, 0].bool()
        for step in range(self.config.max_refinement_steps):
            gate = self._gate(layer, step, hidden[is_slot])
            candidate = apply_layer(hidden)  # Eq. 6
            slots = hidden[is_slot] + gate * (candidate[is_slot] - hidden[is_slot])  # Eq. 8
            hidden = mandatory.clone()  # Eq. 9
            hidden[is_slot] = slots
            self.output.recursion_depth[layer] += gate[:, 0].round().long()
        return hidden

    def _gate(self, layer: int, step: int, slots: torch.Tensor) -> torch.Tensor:
        if self.config.gate_mode == "always":
            return torch.ones(len(slots), 1, dtype=torch.float64)
        prob = self.gate_prob(layer, slots)
        self.output.gate_probs[layer, step] = prob[:, 0].detach()
        hard = (prob >= self.config.gate_threshold).double()
        return prob + (hard - prob).detach() if self.training else hard  # Eq. 7

    def _is_refined(self, layer: int) -> bool:
        gated = range(len(self.layers)) if self.config.gate_layers == "all" else self.config.gate_layers
        if layer == len(self.layers) - 1 and not self.takes_last_steps:
            return False
        return layer in gated and self.config.gate_mode != "off" and bool(self.slot_mask.any())

    def _hook(self, index: int):
        def after_layer(layer, args, kwargs, output):
            self.output.layers.append(args[0][0])
            hidden = output[0]  # (length, hidden): Eq. 4
            if self.moved is not None:  # the text after the slots attends to them at their other positions
                moved = kwargs | {"position_embeddings": self.moved}
                again = layer.forward(args[0], *args[1:], **moved)[0]
                hidden = torch.where(self.later_text[:, None], again, hidden)
            if self._is_refined(index):
                hidden = self.refine(index, hidden, lambda h: layer.forward(h[None], *args[1:], **kwargs)[0])
            if index == len(self.layers) - 1:
                self.output.layers.append(hidden)
            return hidden[None]

        return after_layer

    def _patch_linears(self) -> None:
        scale = self.config.lora_alpha / self.config.lora_r
        for name in [name for name in self.weights if ".lora_A." in name]:
            linear = self.stock.get_decoder().get_submodule(name.split(".lora_A.")[0].removeprefix("model.backbone."))
            down, up = self.weights[name], self.weights[name.replace("lora_A", "lora_B")]

            def forward(x, linear=linear, down=down, up=up):
                return functional.linear(x, linear.weight, linear.bias) + self.slot_mask * scale * (x @ down.T @ up.T)

            linear.forward = forward


def single_passages(is_slot: list[bool], passages: list[int]) -> dict[str, torch.Tensor]:
    """The mask and the positions of a row with independent passages, by the definition in `docs/extensions.md`: a slot
    attends to the text before the slots and to its own passage up to itself; positions of each passage continue after
    the text before the slots, and those of the text after the slots continue after the longest passage."""
    length, slots = len(is_slot), [i for i in range(len(is_slot)) if is_slot[i]]
    passage_of = dict(zip(slots, passages, strict=True))
    mask = torch.full((length, length), torch.finfo(torch.float64).min, dtype=torch.float64)
    positions = []
    for i in range(length):
        for j in range(i + 1):
            if not (is_slot[i] and is_slot[j]) or passage_of[i] == passage_of[j]:
                mask[i, j] = 0.0
        text_before = sum(not is_slot[j] for j in range(i))
        if is_slot[i]:
            positions.append(text_before + sum(passage_of[j] == passage_of[i] for j in slots if j < i))
        else:
            longest = max((passages.count(number) for number in set(passages)), default=0)
            positions.append(text_before + (longest if slots and i > slots[0] else 0))
    return {"attention_mask": mask[None, None], "position_ids": torch.tensor([positions])}


def moves_of_slots(is_slot: list[bool], passages: list[int]) -> torch.Tensor:
    """By how many positions each slot is moved, so that its passage ends where the longest one does; 0 on text."""
    numbers, longest = iter(passages), max((passages.count(number) for number in set(passages)), default=0)
    return torch.tensor([longest - passages.count(next(numbers)) if slot else 0 for slot in is_slot])


def random_case(draw: random.Random) -> tuple[nn.Module, list, str]:
    """A random model, rows for it and a padding side."""
    seed = draw.randrange(10_000)
    model = tiny_aligner(
        draw.choice(["llama", "mistral_window", "gemma2"]),
        seed=seed,
        max_refinement_steps=draw.choice([0, 1, 2, 2, 3]),
        gate_mode=draw.choice(["adaptive", "adaptive", "adaptive", "always", "off"]),
        gate_threshold=draw.choice([0.5, 0.3, 0.8]),
        gate_layers=draw.choice(["all", "all", [0, 2], [1], []]),
        context_token_id=draw.choice([VOCAB_SIZE, VOCAB_SIZE - 1]),  # outside and inside of the vocabulary
    )
    slot_counts = draw.choices(range(13), k=draw.randint(1, 4))
    return model, random_rows(model, slot_counts, seed=seed), draw.choice(["left", "right"])


def numbers_of_passages(passages: list[list[int]] | None) -> dict:
    """Inputs of a batch of independent passages, whose positions the model computes."""
    if passages is None:
        return {}
    numbers = [torch.tensor(row, dtype=torch.long) for row in passages]
    return {"context_passage_ids": pad_sequence(numbers, batch_first=True, padding_value=-1), "position_ids": None}


@torch.no_grad()
def assert_matches_reference(
    model: nn.Module, rows: list, padding_side: str, training: bool = False, passages=None, reference=None, **gates
):
    """Logits of every real position and decisions of every slot are those of Algorithm 1, or of another `reference`.
    `passages` has, for each row, the passage of each slot, if passages are independent."""
    batch = collate(rows, padding_side) | numbers_of_passages(passages)
    output, reference = model.train(training)(**for_generate(batch), **gates), reference or Reference(model)
    for i, (row, of_row) in enumerate(zip(rows, passages or [None] * len(rows), strict=True)):
        expected = reference(row.input_ids, row.context_embeds, training=training, passages=of_row)
        is_text = batch["attention_mask"][i].bool()
        torch.testing.assert_close(output.logits[i, is_text], expected.logits, **EXACT)
        if "context_embeds" in batch:
            num_slots = len(row.context_embeds)
            assert torch.equal(output.recursion_depth[i, :, :num_slots], expected.recursion_depth)
            assert (output.recursion_depth[i, :, num_slots:] == -1).all()


def loss_gradients(model: nn.Module, rows: list, padding_side: str, passages=None) -> tuple[dict, dict]:
    """Gradients of the mean NLL by the model and by the reference, by parameter name; the losses are the same."""
    model.train().zero_grad()
    reference, batch = Reference(model), collate(rows, padding_side) | numbers_of_passages(passages)
    loss, expected = model(**batch).loss, reference.loss(rows, passages=passages)
    torch.testing.assert_close(loss.detach(), expected.detach(), **EXACT)
    loss.backward()
    expected.backward()
    parameters = {name: p for name, p in model.named_parameters() if name in reference.weights}
    both = (parameters, reference.weights)
    return tuple({k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in tensors.items()} for tensors in both)


def stock_model(model: nn.Module, dtype: torch.dtype, attn_implementation: str = "eager") -> nn.Module:
    """The unmodified `transformers` model with the backbone weights of `model`, in evaluation mode, frozen."""
    text_config = copy.deepcopy(model.config.text_config)
    stock = AutoModelForCausalLM.from_config(text_config, attn_implementation=attn_implementation).to(dtype)
    state = {}
    for name, value in model.state_dict().items():
        if ".lora_" in name or ".slot_gate." in name or ".projector." in name:
            continue
        name = name.replace(".base_layer.", ".").replace("model.backbone.", stock.base_model_prefix + ".")
        state[name] = value.detach().to(dtype)
    stock.load_state_dict(state, strict=True)
    buffers = dict(model.model.backbone.named_buffers())
    for name, buffer in stock.get_decoder().named_buffers():  # rotary frequencies are in no state dict
        buffer.copy_(buffers[name])
    return stock.eval().requires_grad_(False)
