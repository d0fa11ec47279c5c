"""Evaluation of ArcAligner: what an answer is worth (`metrics.py`)."""
