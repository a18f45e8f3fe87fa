"""Revisions of users.db, the oldest first."""
