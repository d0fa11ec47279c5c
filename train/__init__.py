"""Training of ArcAligner: a script (`sft.py`) and a recipe for each base model and stage.

What becomes of a row, file by file:

    examples.py       a file or a data set of the Hub -> rows -> tokenized examples, kept on disk
    sft.py            examples -> a padded batch, at a rate of slots drawn for it -> the loss of the stage

`distractors.py` finds passages to stand beside those that answer. `recipe.py` and `run.py` say what is trained and keep
the folder of a run, `stages.py` runs all stages of a recipe, `full_text.py` trains the baseline that reads text,
`cocom.py` the one that compresses it with the backbone itself, and `prompts.py` asks, for validation and evaluation.
"""

from ..common.files import require_extra

require_extra("train", "datasets", "trl", "typer")
