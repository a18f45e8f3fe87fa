"""The models that one server serves, by name. The first is the default.

Each has an engine of its own. Knows nothing of requests, nor of how one model is chosen among several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.config import BadSetting
from app.errors import ApiError
from app.served import DEFAULT_NAME, Served

AUTO_NAME = "auto"


class Models:
    """At least one model. What is found by its path is also found by its name, and the first by `default`."""

    def __init__(self, served: Sequence[Served]) -> None:
        """
        Raises:
            BadSetting: two have one name.
        """
        self._served = tuple(served)
        self._by_name: dict[str, Served] = {}
        for each in self._served:
            if each.name in self._by_name:
                raise BadSetting(f"Two models are called {each.name!r}; accepted: a name for each of its own.")
            self._by_name[each.name] = each
        self._by_name.setdefault(DEFAULT_NAME, self.default)
        for each in self._served:
            for path in each.names:
                self._by_name.setdefault(path, each)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    @property
    def default(self) -> Served:
        return self._served[0]

    @property
    def names(self) -> tuple[str, ...]:
        """What `get` takes, paths left out: each model's own name, and `default`."""
        return tuple(dict.fromkeys((*(each.name for each in self._served), DEFAULT_NAME)))

    def get(self, name: str) -> Served:
        """
        Raises:
            ApiError: 404 `model_not_found`.
        """
        if (found := self._by_name.get(name)) is not None:
            return found
        *others, last = map(repr, self.names)
        accepted = f"{', '.join(others)} or {last}" if others else last
        message = f"The model {name!r:.200} is not served here; accepted: {accepted}."
        raise ApiError(404, message, param="model", code="model_not_found")
