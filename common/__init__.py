"""Base layer: files, rows, public data sets, conversion of files to text. At the top of its files it imports nothing
else of this package."""
