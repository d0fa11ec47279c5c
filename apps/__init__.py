"""Applications of the model: the command line, corpora of slots, the server, and engines other than PyTorch.

cli/       the command `arcaligner`, its demo, and the installation of the default models. Nothing imports it
corpus/    passages encoded once, stored in a table and retrieved for a question
server/    answers over HTTP
engines/   llama.cpp, and what an unmodified vLLM loads to answer from slots
"""
