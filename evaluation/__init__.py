"""Evaluation of ArcAligner, in reading order.

settings, recipes/     what is evaluated
tasks                  questions, golds and passages
retrieval, rerankers   passages of a pool, found and ordered
answering, methods     the ways to answer
evaluate, runs         answers, one line per question
metrics, judge         scores of answers
results, publish       means, intervals and differences; tables for readers
paper                  each table, figure and case study of the paper
analyses/              figures of F1 by compression and speed, gates, categories; tables of speed and abstention
lm_eval_adapter        the aligner in lm-evaluation-harness
"""

from ..common.files import require_extra

require_extra("evaluation", "datasets", "matplotlib", "trl", "typer")
