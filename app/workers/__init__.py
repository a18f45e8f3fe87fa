"""API workers: further processes that accept connections and answer what needs nothing but the engines.

The home process keeps everybody's data, decides who is let in, counts, and keeps workers and engines alive. A worker
answers `/v1/chat/completions`, `/v1/completions` and `/v1/models`; a connection that asks for anything else is handed
over to the home, socket and all.
"""
