"""Answers over HTTP, for clients of OpenAI's API.

listen.py         connections and shutdown
app.py            routes, format of answers, key, limits and metrics
chat_request.py   fields of a request, in the forms that clients send
request.py        requests to an engine, and its answers
engine.py         concurrent requests -> one batch -> answers, token by token
live_rows.py      the rows of that batch, which join and leave
turns.py          turns of the threads that compute
vllm_engine.py    the same with a vLLM that generates the answers
page.html         a web page to ask questions on
"""
