"""Storage of chats and their runs: a file for each noun, over one SQLite database.

Callers name the user, and another's data is not found. Knows nothing of HTTP, models or tools.
"""
