"""Programs over sequences of the engine: thinking separated from answers, turns, and the agent's loop.

Knows nothing of HTTP, chats or databases.
"""
