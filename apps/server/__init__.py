"""Answers over HTTP, as the clients of OpenAI speak it.

listen.py   connections, and the way to end
app.py      what a request may hold and an answer looks like; the addresses, key, limits and metrics
engine.py   requests that arrive together -> one batch -> answers, token by token
page.html   a page to ask from
"""
