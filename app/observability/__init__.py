"""Metrics of a server: counted as requests pass, and read from the engines when somebody asks."""

from app.observability.metrics import Meter
from app.observability.request_metrics import Counting, Goals, RequestWatch

__all__ = ["Counting", "Goals", "Meter", "RequestWatch"]
