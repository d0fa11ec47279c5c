"""AdversarialQA, development set: questions that models failed, about paragraphs of SQuAD. Not in the paper."""

from .squad import to_row
from .task import Task

TASK = Task("adversarialqa", "AdversarialQA", "UCLNLP/adversarial_qa", "adversarialQA", "validation", to_row)
