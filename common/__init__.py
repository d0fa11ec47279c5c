"""Base layer: files, rows, public data sets, conversion of files to text. The top of its files imports nothing else
from this package."""
