"""Answers over HTTP, as the clients of OpenAI speak it.

listen.py         connections, and the way to end
app.py            the addresses, what an answer looks like, key, limits and metrics
chat_request.py   what a request may hold, as clients send it
engine.py         requests that arrive together -> one batch -> answers, token by token
page.html         a page to ask from
"""
