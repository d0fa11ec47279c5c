"""Publish an aligner: one folder with its model card, and its upload to the Hub."""
