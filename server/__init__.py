"""Answers over HTTP, as the clients of OpenAI speak it.

protocol.py   what a request may hold, what an answer looks like
engine.py     requests that arrive together -> one batch -> answers, token by token
app.py        the routes, limits, key and metrics; one process, or replicas of Ray Serve
page.html     a page to ask from
"""
