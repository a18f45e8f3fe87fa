"""API workers: further processes that accept connections and answer requests that need only the engines.

The primary process keeps everybody's data, decides admission, counts, and keeps workers and engines alive. A worker
answers `/v1/chat/completions`, `/v1/completions` and `/v1/models`; a connection that asks for anything else is handed
over to the primary, socket and all.
"""
