"""Remote models: requests to another server's OpenAI or Anthropic API, its stream of events, and its budget.

Knows nothing of plans, chats or privacy: `app.answering.remote_model` decides what is sent.
"""
