"""Metrics of a server: counted as requests pass, and read from the engines when somebody asks."""

from app.metrics.meter import Meter
from app.metrics.watch import Counting, Goals, Watch

__all__ = ["Counting", "Goals", "Meter", "Watch"]
