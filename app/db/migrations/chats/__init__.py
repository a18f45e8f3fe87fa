"""Revisions of ponder.db, the oldest first."""
