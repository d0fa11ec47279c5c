"""A corpus of slots: passages are encoded once, stored in a LanceDB table, and retrieved for a question without
encoding them again.

sources.py     files, folders and data sets of the Hub -> documents -> passages
table.py       the table on disk, with the settings that it was made with
build.py       documents -> passages with their slots -> the table
retrieve.py    a question -> passages with their stored slots
precompute.py  keys and values of all passages, computed in advance and saved in the corpus's folder, where `ask` and
               `serve` look for them
"""

import os

from ...common.files import require_extra

os.environ.setdefault("LANCEDB_LOG", "error")  # its warnings only describe what we told it to do
require_extra("corpus", "lancedb", "datasets")
