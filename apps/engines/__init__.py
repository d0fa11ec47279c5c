"""Engines for the base model other than PyTorch: llama.cpp.

from arcaligner.apps.engines.llama_cpp import LlamaCppEngine

engine = LlamaCppEngine("exported")  # a folder written by `arcaligner export-gguf`
print(engine.answer("Who wrote it?", ["It was written by Ada."]))
"""

from ...common.files import require_extra

require_extra("llama-cpp", "gguf")
