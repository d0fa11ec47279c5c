"""Analyses: each is a command that draws a figure, with its data and a caption, or prints tables."""
