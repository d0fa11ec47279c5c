"""An aligner for others: written as one folder with its model card, and uploaded to the Hub."""
