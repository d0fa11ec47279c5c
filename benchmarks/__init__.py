"""Reports on a trained aligner and timings, each with the machine it ran on."""
