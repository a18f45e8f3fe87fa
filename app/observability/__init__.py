"""Metrics of a server: counted as requests pass, and read from the engines when somebody asks."""

from app.observability.metrics import Counting, Goals, RequestWatch, ServerMetrics

__all__ = ["Counting", "Goals", "RequestWatch", "ServerMetrics"]
