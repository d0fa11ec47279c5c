"""The floor: files, rows, public data sets, texts of people's files. It imports nothing else of this package."""
