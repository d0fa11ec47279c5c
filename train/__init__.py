"""Training of ArcAligner: a script (`sft.py`) and a recipe for each base model and stage.

From a row to a loss, file by file:

    examples.py       a file or a data set of the Hub -> rows -> tokenized examples, cached on disk
    sft.py            examples -> a padded batch, at a compression rate drawn for it -> the loss of the stage

`distractors.py` finds passages to add to those that contain the answer. `recipe.py` parses a recipe, `run.py` manages
the folder of a run, `stages.py` runs all stages of a recipe, `full_text.py` trains the full-text baseline, `cocom.py`
the baseline that compresses passages with the backbone, and `prompts.py` makes prompts for validation and evaluation.
"""

from ..common.files import require_extra

require_extra("train", "datasets", "trl", "typer")
