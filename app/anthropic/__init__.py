"""Anthropic's Messages API under `/v1/messages`, over the same answers as OpenAI's.

A request's road is the file list: `request_models` checks its fields, `content_blocks` makes its conversation one of
chat messages, `message_job` plans it as a chat request and renders the answer, `routes` sends it.
"""
