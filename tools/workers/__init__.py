"""Processes beside the server that do one bounded thing each, within limits of time and memory."""
