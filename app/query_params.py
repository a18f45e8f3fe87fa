"""Parameters of routes: those after the question mark, and numbers in a path.

As strict as bodies are: a parameter that a route does not know is refused by name, rather than left out of its answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from app.errors import ApiError, invalid
from app.request_body import explain

ParamsModel = TypeVar("ParamsModel", bound=BaseModel)

_DIGITS = 18  # fewer than SQLite's largest integer has


def whole_number(text: str) -> int | None:
    """0 or more, within SQLite's integers; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _digits(value: Any) -> Any:  # Any: a default is no text
    if isinstance(value, str) and (number := whole_number(value)) is not None:
        return number
    if isinstance(value, str):
        raise ValueError("not a whole number of 0 or more")
    return value


WholeNumber = Annotated[int, BeforeValidator(_digits, json_schema_input_type=int)]
Flag = Literal["true", "false"]


class NoParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")


class QueryParams(Generic[ParamsModel]):
    """Dependency: the parameters after the question mark, each given once, as `model` has them. An empty one is absent.

    Its model's field descriptions name the accepted values; the schema is the document's (`app.openapi`).
    """

    def __init__(self, model: type[ParamsModel]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> ParamsModel:
        """
        Raises:
            ApiError: 400, naming the parameter.
        """
        accepted = self.model.model_fields
        given: dict[str, str] = {}
        for name, text in request.query_params.multi_items():
            if name not in accepted:
                known = ", ".join(accepted) or "none"
                raise invalid(name, f"{name!r:.60} is not a parameter here; accepted: {known}.", "unknown_parameter")
            if not text:
                continue
            if name in given:
                raise invalid(name, f"{name} is given twice; accepted: one.")
            given[name] = text
        try:
            return self.model.model_validate(given)
        except ValidationError as error:
            raise explain(error, self.model) from None


_no_parameters = QueryParams(NoParameters)


async def _only_known(request: Request) -> None:
    route = request.scope["route"]
    if not any(isinstance(each.call, QueryParams) for each in route.dependant.dependencies):
        await _no_parameters(request)


ONLY_KNOWN = Depends(_only_known)  # of a router: a route without `QueryParams` takes no parameters


def number_in_path(text: str, what: str) -> int:
    """
    Raises:
        ApiError: 404, as of a number that nothing has.
    """
    if (number := whole_number(text)) is None:
        raise ApiError(404, f"There is no {what} {text!r:.60}.", code="not_found")
    return number
