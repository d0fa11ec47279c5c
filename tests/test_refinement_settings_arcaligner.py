"""Gates set for one call: as if the configuration said so, which it never does."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_generation_arcaligner import SIX_TOKENS, prompts
from tiny_models import tiny_aligner

OTHER_GATES = [
    {"gate_threshold": 0.7},
    {"max_refinement_steps": 1},
    {"gate_mode": "off"},
    {"gate_mode": "always", "max_refinement_steps": 3},
    {"gate_mode": "adaptive", "gate_threshold": 0.2, "max_refinement_steps": 4},
]


@pytest.fixture
def model():
    return tiny_aligner("llama", dtype=torch.float32)


@pytest.mark.parametrize("gates", OTHER_GATES)
@pytest.mark.parametrize("method", [{}, {"use_cache": False}, {"num_beams": 3}])
def test_generate_with_other_gates_is_the_configuration_with_them(model, gates, method):
    batch = prompts(model, [3, 6, 0])
    recorded = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    found = model.generate(**batch, **SIX_TOKENS, **method, **recorded, **gates)
    plain = model.generate(**batch, **SIX_TOKENS, **method, **recorded)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    model.config.update(gates)
    expected = model.generate(**batch, **SIX_TOKENS, **method, **recorded)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert not torch.equal(found.logits[0], plain.logits[0])


def test_threads_see_neither_slots_nor_gates_of_each_other(model):
    """Five batches, one of text alone, each with its own gates."""
    settings = [*OTHER_GATES[:3], {}, {"refinement_budget": 0.3}]
    batches = [prompts(model, [count], seed=count) | settings[count] for count in range(5)]

    @torch.no_grad()
    def read(batch):
        return model(**batch).logits

    expected = [read(batch) for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(read, batches * 12))
    assert all(torch.equal(logits, expected[number % 5]) for number, logits in enumerate(found))


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"gate_mode": "sometimes"}, "is 'sometimes'; expected one of adaptive, off, always"),
        *(({"gate_threshold": each}, rf"is {each!r}; .*\(0, 1\]") for each in (0, 1.01, "0.5", float("nan"))),
        *(({"max_refinement_steps": each}, f"is {each}; .*whole number of at least 0") for each in (-1, 1.5)),
        *(
            ({"refinement_budget": each}, f"is {each!r}; expected a share")
            for each in (-0.1, float("nan"), "10%", True)
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_slots_and_without(model, setting, message):
    for batch in (prompts(model, [4]), {"input_ids": torch.tensor([[5, 6, 7]])}):
        for call in (model, model.model, model.generate):
            with pytest.raises(ValueError, match=f"`{next(iter(setting))}` {message}"):
                call(**batch, **setting)
    with pytest.raises(ValueError, match="gate_treshold"):  # misspelt
        model.generate(**batch, gate_treshold=0.7)
