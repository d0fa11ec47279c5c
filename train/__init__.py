"""Training of ArcAligner: one script (`sft.py`), a recipe for each backbone and stage.

The way of a training row, file by file:

    data.py             rows of a JSON Lines file -> prompts with slots and their targets, tokenised
    templates.py        the paper's words around the slots
    embedding_store.py  the segments' embeddings, computed once, kept on disk
    collator.py         rows -> a padded batch with `context_embeds`
    trainer.py          TRL's `SFTTrainer`, with what can go wrong silently refused
    sft.py              parse -> data -> model -> train -> save
"""
