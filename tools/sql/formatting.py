"""SQL's `printf`, written anew: SQLite's own can be told to write a thousand million characters, and takes its time.

Knows widths and precisions up to a limit, and no `*`.
"""

from __future__ import annotations

import re

WIDEST = 1000  # characters of one field
_FIELD = re.compile(
    r"%(?P<flags>[-+ 0#,]*)(?P<width>\d{0,9})(?:\.(?P<precision>\d{0,9}))?l{0,2}(?P<kind>.|\Z)", re.DOTALL
)


def formatted(template: object = None, *values: object) -> str | None:
    """
    Raises:
        ValueError: a field is of no kind known here, or too wide.
    """
    if template is None:
        return None
    left = iter(values)

    def field(match: re.Match[str]) -> str:
        kind, flags, width = match["kind"], match["flags"], int(match["width"] or 0)
        if kind == "%":
            return "%"
        precision = match["precision"]
        if kind not in "diufFeEgGscxXo" or not kind or max(width, int(precision or 0)) > WIDEST:
            raise ValueError(match[0])
        value = next(left, None)
        mark = f"%{flags.replace(',', '')}{width or ''}" + ("" if precision is None else f".{precision or 0}")
        if kind in "sc":
            text = "" if value is None else _text(value)
            return f"{mark}s" % (text[:1] if kind == "c" else text)
        number = _number(value)
        if kind in "diuxXo":
            whole = int(number)
            return (
                f"{whole:,}".rjust(width)
                if "," in flags
                else f"{mark}{kind.replace('i', 'd').replace('u', 'd')}" % whole
            )
        return f"{number:,.{precision or 6}f}".rjust(width) if "," in flags else f"{mark}{kind}" % number

    return _FIELD.sub(field, _text(template))


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _number(value: object) -> float | int:
    if isinstance(value, (int, float)):
        return value
    found = re.match(r"\s*[-+]?(?:\d+(?:\.\d*)?|\.\d+)", _text(value) if value is not None else "")
    return (float(found[0]) if "." in found[0] else int(found[0][:30])) if found else 0
