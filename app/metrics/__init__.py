"""What is measured of a server: counted as requests pass, and read from the engines when somebody asks."""

from app.metrics.meter import Goals, Meter, Watch

__all__ = ["Goals", "Meter", "Watch"]
