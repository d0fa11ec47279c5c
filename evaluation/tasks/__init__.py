"""The sets of questions: the paper's six, in its order, then three more. Each is a file of its own."""

from . import adversarialqa, hotpotqa, musique, nq, popqa_longtail, squad, triviaqa, two_wiki, webq
from .task import Row, Task, choose_passages

TASKS = {
    module.TASK.name: module.TASK
    for module in (two_wiki, hotpotqa, nq, popqa_longtail, triviaqa, webq, squad, adversarialqa, musique)
}
PAPER_TASKS = tuple(TASKS)[:6]

__all__ = ["PAPER_TASKS", "TASKS", "Row", "Task", "choose_passages"]
