"""The ways to answer that are compared: the paper's baselines, its method, its ablations, and what bounds them.

A method says which checkpoint it reads with and how it is loaded. One whose weights or package are not on the machine
raises `MissingMethodError`: it is skipped by name, never replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .answering import Row, closed_book_text, passages_text, text_prompt
from .fingerprints import backbone_fingerprint, fingerprint
from .prompt_compression import LLMLINGUA2_MODEL, load_llmlingua, load_llmlingua2
from .reading import MissingMethodError, Reader, SlotReader, TextReader, load_aligner, load_text_lora
from .released import COCOM, XRAG_MODEL, load_cocom, load_released_xrag


@dataclass(frozen=True)
class Checkpoints:
    """
    What there is to read with.

    Args:
        aligner (`str`): An aligner's folder or Hub id; its backbone, chat template and segmentation are everybody's.
        xrag (`str`, *optional*): An aligner of a projector alone with one slot a passage, as xRAG's.
        projector_only (`str`, *optional*): An aligner of a projector alone with the slots of `aligner`.
        full_text_lora (`str`, *optional*): A LoRA of the backbone that reads text, of `train/full_text.py`.
        device (`str`): Where models run.
    """

    aligner: str
    xrag: str | None = None
    projector_only: str | None = None
    full_text_lora: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Method:
    """
    A way to answer.

    Args:
        name (`str`): In commands and of files.
        title (`str`): In tables.
        load (`Callable`): From checkpoints to a reader.
        checkpoint (`str`, *optional*): The field of `Checkpoints` that decides the answers; `None` where the backbone
            alone does.
        made_by (`str`, *optional*): The command that makes such a checkpoint.
        weights (`str`, *optional*): Name of weights that decide, besides or in place of the backbone's.
    """

    name: str
    title: str
    load: Callable[[Checkpoints], Reader]
    checkpoint: str | None = None
    made_by: str | None = None
    weights: str | None = None

    def checkpoint_of(self, checkpoints: Checkpoints) -> str:
        """The checkpoint that the method reads with."""
        return getattr(checkpoints, self.checkpoint or "aligner")

    def fingerprint_of(self, checkpoints: Checkpoints) -> str:
        """What the answers of this method depend on.

        Raises:
            `MissingMethodError`: a checkpoint that is not named, or not there.
        """
        if self.checkpoint is None:
            backbone = backbone_fingerprint(checkpoints.aligner)
            return f"{self.weights}, {backbone}" if self.weights else backbone
        checkpoint = self.checkpoint_of(checkpoints)
        if self.made_by is None:
            return fingerprint(checkpoint)
        option = f"--{self.checkpoint.replace('_', '-')}"
        if checkpoint is None:
            raise MissingMethodError(f"name its checkpoint with `{option}`; `{self.made_by}` makes one")
        try:
            return fingerprint(checkpoint)
        except (ValueError, OSError) as error:
            raise MissingMethodError(
                f"there is no {checkpoint}, named with `{option}`; `{self.made_by}` makes one"
            ) from error


def load_naive(checkpoints: Checkpoints) -> Reader:
    """The question alone."""
    model, processor = load_aligner(checkpoints.aligner, checkpoints.device)
    return TextReader(model, processor, lambda row, _: closed_book_text(row), lambda rows: [""] * len(rows))


def load_standard_rag(checkpoints: Checkpoints) -> Reader:
    """The passages' whole text."""
    model, processor = load_aligner(checkpoints.aligner, checkpoints.device)
    return TextReader(model, processor, text_prompt, whole_texts)


def load_truncated(checkpoints: Checkpoints) -> Reader:
    """As many tokens of the passages' text as the aligner has slots."""
    model, processor = load_aligner(checkpoints.aligner, checkpoints.device)
    return TextReader(model, processor, text_prompt, lambda rows: truncated_texts(processor, rows))


def load_full_text_lora(checkpoints: Checkpoints) -> Reader:
    """The passages' whole text, read by the backbone with a LoRA that was trained for it."""
    model, processor = load_text_lora(checkpoints.aligner, checkpoints.full_text_lora, checkpoints.device)
    return TextReader(model, processor, text_prompt, whole_texts)


def load_slots(gate_mode: str, **options) -> Callable[[Checkpoints], Reader]:
    """The aligner, read in one way."""
    return lambda checkpoints: SlotReader(
        *load_aligner(checkpoints.aligner, checkpoints.device), gate_mode=gate_mode, **options
    )


def load_projector(field: str) -> Callable[[Checkpoints], Reader]:
    """An aligner of a projector alone, named by a field of `Checkpoints`."""

    def load(checkpoints: Checkpoints) -> Reader:
        checkpoint = getattr(checkpoints, field)
        model, processor = load_aligner(checkpoint, checkpoints.device)
        if model.config.lora_r:
            raise ValueError(
                f"{checkpoint} has a LoRA of rank {model.config.lora_r}; for `--{field.replace('_', '-')}` expected an "
                "aligner of a projector alone, trained with `aligner: {lora_r: 0, gate_layers: []}`."
            )
        return SlotReader(model, processor, gate_mode="off")

    return load


def whole_texts(rows: list[Row]) -> list[str]:
    """All text of each row's passages."""
    return [passages_text(row) for row in rows]


def truncated_texts(processor, rows: list[Row]) -> list[str]:
    """The beginning of each row's passages, of as many tokens as there are slots for all of them."""
    texts = []
    for row, text in zip(rows, whole_texts(rows), strict=True):
        num_slots = max(1, len(processor.segment_documents(row["passages"])))
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"][:num_slots]
        texts.append(processor.tokenizer.decode(ids).strip())
    return texts


_TRAIN = "python -m arcaligner train --recipe"
_FULL_TEXT = "python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml"

METHODS = {
    method.name: method
    for method in (
        Method("naive", "Naive", load_naive),
        Method("standard_rag", "StandardRAG", load_standard_rag),
        Method("full_text_lora", "StandardRAG, fine-tuned", load_full_text_lora, "full_text_lora", _FULL_TEXT),
        Method("truncated", "truncated text", load_truncated, "aligner"),
        Method("llmlingua", "LLMLingua (the backbone scores)", load_llmlingua),
        Method("llmlingua2", "LLMLingua-2", load_llmlingua2, weights=LLMLINGUA2_MODEL),
        Method("cocom_4", "COCOM x4", load_cocom(4), weights=COCOM.format(4)),
        Method("cocom_16", "COCOM x16", load_cocom(16), weights=COCOM.format(16)),
        Method("xrag_released", "xRAG (released)", load_released_xrag, weights=XRAG_MODEL),
        Method("xrag", "xRAG (our training)", load_projector("xrag"), "xrag", f"{_TRAIN} xrag"),
        Method(
            "projector_only",
            "projector only",
            load_projector("projector_only"),
            "projector_only",
            f"{_TRAIN} projector_only",
        ),
        Method("arcaligner", "ArcAligner", load_slots("adaptive"), "aligner"),
        Method("no_recursion", "w/o Recursion", load_slots("off"), "aligner"),
        Method("max_loop", "w/o Gate (Max Loop)", load_slots("always"), "aligner"),
        Method("no_lora", "w/o LoRA & Recursion", load_slots("off", use_lora=False), "aligner"),
        Method("empty_slot", "an empty slot", load_slots("adaptive", with_passages=False), "aligner"),
    )
}
ABLATIONS = ("arcaligner", "no_recursion", "max_loop", "no_lora")
