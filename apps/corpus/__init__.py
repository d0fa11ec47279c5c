"""A corpus of slots: passages are encoded once, stored in a LanceDB table, and retrieved for a question without
encoding them again.

sources.py   files, folders and data sets of the Hub -> documents -> passages
table.py     the table on disk, with the settings that it was made with
build.py     documents -> passages with their slots -> the table
retrieve.py  a question -> passages with their stored slots
kept.py      precomputed passages: their keys and values, in a folder of the corpus, where the server's cache finds them
"""

import os

from ...common.files import require_extra

os.environ.setdefault("LANCEDB_LOG", "error")  # its warnings repeat what we ask it to do
require_extra("corpus", "lancedb", "datasets")
