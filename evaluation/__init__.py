"""Evaluation of ArcAligner, in reading order.

settings, recipes/     what is asked for
tasks                  questions, golds and passages
retrieval              passages from a corpus
methods                the ways to answer: answering, compression (of prompts), released (checkpoints of others)
evaluate, runs         answers, one line per question
metrics, judge         what an answer is worth
results, publish       means, intervals and differences; tables for readers
analyses/              the paper's figures, and two of our own
lm_eval_adapter        the aligner in lm-evaluation-harness
"""
