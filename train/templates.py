"""The words around the slots in stage I: the six templates of the paper's appendix.

A template of stage I reads "... [B] ... [T]": the slots stand for [B]; all words before [T] are the
user's turn and [T], the text behind the slots, is the assistant's. The prompt of stages II and III
belongs to the processor, which writes the same one at inference; see
`ArcAlignerProcessor.apply_chat_template`.
"""

import hashlib
from typing import NamedTuple


class ReconstructionTemplate(NamedTuple):
    """A stage-I instruction: the user's words before and after the slots."""

    intent: str
    before: str
    after: str


# Table "Stage-I instruction templates", in its order; the full stop behind [T] is the target's own.
RECONSTRUCTION_TEMPLATES = (
    ReconstructionTemplate("equivalence statement", "Background: ", ". This is equivalent to:"),
    ReconstructionTemplate("direct rewrite", "Rewrite the background in your own words: ", " →"),
    ReconstructionTemplate("restatement request", "Provide a restatement of the background: ", ". Return:"),
    ReconstructionTemplate("paraphrase-as-question", "", " is a paraphrase of what? Answer with:"),
    ReconstructionTemplate(
        "two-formulation alignment",
        "These two expressions convey the same meaning: (1) ",
        " (2)",
    ),
    ReconstructionTemplate("minimal-output constraint", "Restate ", " using a single sentence. Output only"),
)


def stable_number(key: str, modulus: int) -> int:
    """A number below `modulus` that `key` alone decides, the same on each machine.

    >>> stable_number("recon_train_0", 6) == stable_number("recon_train_0", 6)
    True
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % modulus


def choose_template(example_id: str) -> ReconstructionTemplate:
    """The stage-I template of an example, fixed by its id."""
    index = stable_number(f"template:{example_id}", len(RECONSTRUCTION_TEMPLATES))
    return RECONSTRUCTION_TEMPLATES[index]


# Beyond the paper: what stands behind the slots of a turn that goes on with the text after theirs.
CONTINUATION = " Continue:"
