"""Answers over HTTP, for clients of OpenAI's API.

listen.py         connections and shutdown
app.py            routes, format of answers, key, limits and metrics
chat_request.py   fields of a request, in the forms that clients send
engine.py         concurrent requests -> one batch -> answers, token by token
page.html         a page to ask from
"""
