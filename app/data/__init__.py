"""What a server keeps of chats and their runs: a file for each noun, over one SQLite database.

Whoever asks names the user, and what is another's is not found. Knows nothing of HTTP, models or tools.
"""
