"""How one forward refines: the configuration's gates, or what a caller of `generate` or `forward` wants instead.

The settings travel to the layers with the forward, so that two threads may read with different ones, and the
configuration stays as it is.
"""

import math
from dataclasses import dataclass, field
from numbers import Real

from .configuration_arcaligner import ArcAlignerConfig, check_gates
from .refinement_arcaligner import SharedStepInputs, SlotRows
from .refinement_budget_arcaligner import LayerCost, RefinementBudget

# Keyword arguments of `generate` and `forward`.
REFINEMENT_SETTINGS = ("gate_mode", "gate_threshold", "max_refinement_steps", "refinement_budget")
# Attention kernels that take a mask of rows by columns, so that some slots can be computed without the others.
ROW_KERNELS = ("eager", "sdpa")


@dataclass(frozen=True)
class RefinementSettings:
    """What the layers of one forward go by."""

    gate_mode: str
    gate_threshold: float
    max_refinement_steps: int
    budget: RefinementBudget | None
    shared_inputs: SharedStepInputs = field(default_factory=SharedStepInputs, compare=False)


def check_refinement_settings(
    gate_mode: str | None = None,
    gate_threshold: float | None = None,
    max_refinement_steps: int | None = None,
    refinement_budget: float | None = None,
) -> None:
    """Raises `ValueError` for a setting that no model could use; `None` is always right."""
    check_gates(gate_mode, gate_threshold, max_refinement_steps)
    if refinement_budget is None:
        return
    is_number = isinstance(refinement_budget, Real) and not isinstance(refinement_budget, bool)
    if not is_number or not refinement_budget >= 0:  # NaN is not
        raise ValueError(
            f"`refinement_budget` is {refinement_budget!r}; expected a share of the prefill of at least 0, such as "
            "0.1 for 10 % more operations. 0 switches refinement off, infinity leaves it to the gates."
        )


def gates_and_budget(gate_mode: str | None, refinement_budget: float | None) -> tuple[str | None, float | None]:
    """Both in one spelling: a budget of nothing is no refinement, and one without end is none.

    >>> gates_and_budget("adaptive", 0), gates_and_budget("adaptive", math.inf), gates_and_budget("adaptive", 0.1)
    (('off', None), ('adaptive', None), ('adaptive', 0.1))
    """
    if refinement_budget == 0:
        return "off", None
    return gate_mode, None if refinement_budget == math.inf else refinement_budget


def settings_of_forward(
    config: ArcAlignerConfig,
    costs: list[LayerCost],
    rows: SlotRows,
    training: bool,
    gate_mode: str | None = None,
    gate_threshold: float | None = None,
    max_refinement_steps: int | None = None,
    refinement_budget: float | None = None,
) -> RefinementSettings:
    """The settings of a forward: those that are given, checked before, and else the configuration's.

    Raises:
        `ValueError`: a budget in training, or with an attention kernel that computes slots all or none.
    """
    gate_mode = config.gate_mode if gate_mode is None else gate_mode
    gate_mode, refinement_budget = gates_and_budget(gate_mode, refinement_budget)
    budget = None
    if refinement_budget is not None:
        if training:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget} in training, where every slot takes every step for the "
                "gradients of the gates. Call `model.eval()`, or leave it out."
            )
        if (kernel := config.text_config._attn_implementation) not in ROW_KERNELS:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget}, but attention `{kernel}` can only refine the whole "
                f"prefix at once. Load the model with `attn_implementation` {' or '.join(ROW_KERNELS)}."
            )
        budget = RefinementBudget(refinement_budget, costs, rows)
    return RefinementSettings(
        gate_mode=gate_mode,
        gate_threshold=config.gate_threshold if gate_threshold is None else gate_threshold,
        max_refinement_steps=config.max_refinement_steps if max_refinement_steps is None else max_refinement_steps,
        budget=budget,
    )
