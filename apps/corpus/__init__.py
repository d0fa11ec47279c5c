"""A corpus of slots: passages encoded once, kept in a LanceDB table, found for a question and read without encoding.

sources.py   files, folders and data sets of the Hub -> documents -> passages
table.py     the table on disk and what it was made with
build.py     documents -> passages with their slots -> the table
retrieve.py  a question -> passages with their stored slots
kept.py      passages read ahead: their keys and values beside the slots, where the server's store finds them
"""

import os

from ...common.files import require_extra

os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of what it is asked to do
require_extra("corpus", "lancedb", "datasets")
