"""The policy as an OpenAI-compatible API, for programs that play episodes; what is asked is kept.

Read `runner.py` first: an episode gets a `Session` (`session.py`), which turns each request into
tokens and grows a `TokenTree` (`tree.py`), of which `rows.py` makes what is learned from. `app.py`
has the routes, `wire.py` their JSON.
"""
