"""Base layer: files, rows, public data sets, conversion of files to text. Of this package, the top of its files imports
only this layer and `tokenization_arcaligner.py`."""
