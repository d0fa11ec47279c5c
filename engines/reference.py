"""Reference vectors: what an engine has to compute from the same prompts and slots.

    python -m arcaligner.engines.reference --output reference.safetensors

For each prompt, by its number: `before` and `after`, the ids around the slots; `slots` (num_slots, hidden), what the
first layer reads, and `passages` (num_slots,), the number of each slot's passage where passages are read apart, each
from the position after `before`; `keys` and `values` (layers, heads, length, head_dim) up to the last slot, rotated as
in transformers; `logits` (vocab_size,) of the answer's first token; and `answer`, the ids of the greedy answer.
"""

from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
import typer

from ..common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, run_command, write_whole
from ..common.rows import Row, read_rows
from ..configuration_arcaligner import check_gates
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor

NEW_TOKENS = 16


@torch.no_grad()
def reference_vectors(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, row: Row, gate_mode: str = "off"
) -> dict[str, torch.Tensor]:
    """The vectors of one question and its passages."""
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": row["question"]}],
        documents=row["passages"],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids = inputs["input_ids"][0]
    slots = (ids == model.config.context_token_id).nonzero().flatten()
    settings = {"gate_mode": gate_mode}
    cache = model.prefill_context(**inputs, **settings)
    answer = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
    passages = inputs.get("context_passage_ids")
    return ({} if passages is None else {"passages": passages[0]}) | {
        "before": ids[: slots[0]],
        "slots": model.model.project(inputs["context_embeds"], inputs.get("context_word_ids"))[0],
        "after": ids[slots[-1] + 1 :],
        "keys": torch.cat([layer.keys for layer in cache.layers]),
        "values": torch.cat([layer.values for layer in cache.layers]),
        "logits": model(**inputs, logits_to_keep=1, **settings).logits[0, 0],
        "answer": answer[0, len(ids) :],
    }


def main(
    output: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    gate_mode: Annotated[str, typer.Option(help="When slots are refined: off, adaptive, always.")] = "off",
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = SQUAD_SAMPLE,
    num_prompts: Annotated[int, typer.Option("-n", help="Number of prompts.", min=1)] = 4,
) -> None:
    """Writes what an engine has to compute, in float32."""
    check_gates(gate_mode, None, None)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = [row for row in read_rows(data) if row["question"]][:num_prompts]
    found = {}
    for number, row in enumerate(rows):
        vectors = reference_vectors(model, processor, row, gate_mode)
        found |= {f"{number}.{name}": vector.contiguous() for name, vector in vectors.items()}
    write_whole(output, safetensors.torch.save(found, {"gate_mode": gate_mode}))


if __name__ == "__main__":
    run_command(main)
