"""Column types of the tables and of their migrations; SQLite's own names where its files have them already."""

from __future__ import annotations

from sqlalchemy import REAL, Boolean, Double, Integer
from sqlalchemy.types import TypeEngine

# Of eight bytes in both. Moments are seconds since the epoch.
NUMBER: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
FLAG: TypeEngine[bool] = Boolean().with_variant(Integer(), "sqlite")
