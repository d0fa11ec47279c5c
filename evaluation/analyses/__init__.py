"""Analyses: the paper's figures, each a command that writes a picture, its data, and how to read it."""
