"""Training of ArcAligner: a script (`sft.py`) and a recipe for each base model and stage.

What becomes of a row, file by file:

    corpora.py    a file or a data set of the Hub -> rows
    selection.py  which rows, with which distractors; kept on disk
    data.py       rows -> tokenized examples -> a padded batch, at a rate of slots drawn for it
    trainer.py    the encoder, the model and the loss of the stage

`recipe.py` and `run.py` say what is trained and keep the folder of a run, `stages.py` runs all stages of a recipe,
`full_text.py` trains the baseline that reads text.
"""

from ..common.files import require_extra

require_extra("train", "datasets", "trl", "typer")
