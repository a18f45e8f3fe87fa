"""Validates a JSON text against a schema: run by `checked` beside the server, within limits of time and memory.

Run as a script. A schema's patterns are Python's here and may take for ever, so they are never matched in the server's
own process. Reads `[schema, text]` from stdin and writes the error, or null. Nothing is fetched.
"""

from __future__ import annotations

import json
import resource
import sys

CPU_S, MEMORY_BYTES = 5, 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from jsonschema import Draft202012Validator, exceptions
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema, text = json.load(sys.stdin)
    try:
        value = json.loads(text)
        kind = validator_for(schema, default=Draft202012Validator)
        error = exceptions.best_match(kind(schema, registry=Registry()).iter_errors(value))
        wrong = None if error is None else f"{error.json_path}: {error.message}"
    except ValueError as broken:
        wrong = f"it is not JSON: {broken}"
    except Exception as failed:  # a schema that the validator cannot follow is reported like any other error
        wrong = f"the schema cannot be checked: {type(failed).__name__}: {failed}"
    print(json.dumps(wrong and wrong[:300]))


if __name__ == "__main__":
    main()
