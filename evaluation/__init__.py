"""Evaluation of ArcAligner, in reading order.

settings, recipes/     what is asked for
tasks/                 questions, golds and passages
retrieval              passages from a corpus: retrieval_index, reranking
methods                the ways to answer: reading, answering (prompts), prompt_compression, released
evaluate, runs         answers, one line a question
metrics, judge         what an answer is worth; judge_models, judge_validation
results, tables        means, intervals and differences; publish
analyses/              the paper's figures
lm_eval_adapter        the aligner in lm-evaluation-harness
"""
