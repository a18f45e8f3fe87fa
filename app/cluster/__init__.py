"""Servers that share one PostgreSQL database, and what they tell each other by Redis.

Redis carries nothing that must last: leases of the servers that live, the tail of each run's log, commands to the
server that makes a run, counts of a minute. The database has all the rest, so without Redis readers ask it
instead, limits are counted by each server alone, and nobody is taken for dead. Knows nothing of HTTP, nor of how
answers are made.
"""

from app.cluster.cluster import Cluster, open_store

__all__ = ["Cluster", "open_store"]
