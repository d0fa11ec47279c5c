"""The command line, its demo, and the installation of the default models. Nothing imports it."""
