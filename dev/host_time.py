"""Measure the CPU time of a forward with 25 slots, and of the bare model with 25 tokens of text, at batch size 1.

    taskset -c 0 env OMP_NUM_THREADS=1 python dev/host_time.py

At batch size 1 a GPU waits for the CPU, so these times say what slots cost on a GPU. The model has the number of layers
of Mistral and a hidden size of 64, so that matrix products take almost no time. The variants take turns, one forward
each. Printed are medians in milliseconds of CPU time, which other work on the machine changes little, and their ratios
to the bare model.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM

LAYERS, BEFORE, SLOTS, AFTER = 32, 10, 25, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="Number of forwards per variant. Default: 100.")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["off", "adaptive", "always"],
        help="Gate modes to measure: off, adaptive and always. Default: all three.",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text_config = AutoConfig.for_model(
        "mistral",
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        sliding_window=None,
    )
    of_aligner = {"encoder_hidden_size": 32, "lora_r": 8, "lora_alpha": 16, "gate_layers": "all", "gate_hidden_size": 8}
    config = ArcAlignerConfig(text_config=text_config, **of_aligner, max_refinement_steps=2)
    config._attn_implementation = "sdpa"
    aligner = ArcAlignerForCausalLM(config).eval()
    base = AutoModelForCausalLM.from_config(text_config, attn_implementation="sdpa").eval()
    ids = torch.randint(3, 499, (1, BEFORE + SLOTS + AFTER))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True, "logits_to_keep": 1}
    slot_ids = ids.clone()
    slot_ids[:, BEFORE : BEFORE + SLOTS] = config.context_token_id
    slots = text | {"input_ids": slot_ids, "context_embeds": torch.randn(1, SLOTS, config.encoder_hidden_size)}
    ways = {"text, the bare model": lambda: base(**text), "text, the aligner": lambda: aligner(**text)}
    for mode in args.modes:
        ways[f"slots, gates {mode}"] = lambda mode=mode: aligner(**slots, gate_mode=mode)
    times = {name: [] for name in ways}
    with torch.no_grad():
        for number in range(args.rounds + 5):
            for name, run in ways.items():
                start = time.process_time()
                run()
                if number >= 5:
                    times[name].append(1e3 * (time.process_time() - start))
    bare = statistics.median(times["text, the bare model"])
    for name, milliseconds in times.items():
        print(f"{name:24s} {statistics.median(milliseconds):7.2f} ms {statistics.median(milliseconds) / bare:6.2f}")


if __name__ == "__main__":
    main()
