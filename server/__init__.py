"""Answers over HTTP, as the clients of OpenAI speak it.

protocol.py   what a request may hold, what an answer looks like
answers.py    a request, its answer, and how those of a batch are written
engine.py     requests that arrive together -> one batch -> answers, token by token
files.py      a file that is dropped into the page -> passages
app.py        the routes, limits, key and metrics
page.html     a page to ask from
"""
