"""Analyses: each is a command that writes a figure, its data and a caption."""
