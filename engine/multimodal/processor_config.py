"""Reading an image processor's settings strictly, as transformers writes them: what is not understood is refused."""

from __future__ import annotations

from pathlib import Path

from engine.errors import CheckpointError
from engine.model.loader import Json, read_json

FILES = ("processor_config.json", "preprocessor_config.json")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of red, green and blue
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def has_processor(path: Path) -> bool:
    """Returns whether a model directory has the settings of an image processor."""
    own = read_json(path / FILES[0], required=False) if path.is_dir() else {}
    return isinstance(own.get("image_processor"), dict) or (path / FILES[1]).is_file()


def read_settings(
    path: Path, kinds: tuple[str, ...], steps: tuple[str, ...] = _STEPS, *, nulls: bool = True
) -> tuple[Json, Json]:
    """Returns the settings of a model directory's whole processor, and of that of images.

    `kinds` begin the names of image processors that are understood, the first of which is meant where none is named;
    `steps` are those that must not be left out. With `nulls` a null is as if the setting were not there.

    Raises:
        CheckpointError: they are missing, or of a processor that is not understood.
    """
    own = read_json(path / FILES[0], required=False)
    nested = own.get("image_processor")
    given = nested if isinstance(nested, dict) else read_json(path / FILES[1])
    if nulls:
        given = {field: value for field, value in given.items() if value is not None}
    kind = str(given.get("image_processor_type", kinds[0]))
    if not kind.startswith(kinds):
        raise refused("image_processor_type", kind, " or ".join(kinds))
    for field in steps:
        if given.get(field, True) is not True:
            raise refused(field, given[field], "true")
    return own, given


def channels(given: Json, field: str, default: tuple[float, float, float] = (0.5, 0.5, 0.5)) -> tuple[float, ...]:
    """Returns a number for each of red, green and blue. Raises CheckpointError."""
    value = given.get(field, list(default))
    if not isinstance(value, list) or len(value) != 3:
        raise refused(field, value, "three numbers, for red, green and blue")
    return tuple(map(float, value))


def pixels(value: object, field: str, accepted: str) -> int:
    """Returns a number of pixels. Raises CheckpointError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(field, value, accepted)
    return value


def refused(field: str, value: object, accepted: str) -> CheckpointError:
    """Returns the error for a setting that is not understood."""
    return CheckpointError(f"The image processor's {field} is {value!r}; supported: {accepted}.")
