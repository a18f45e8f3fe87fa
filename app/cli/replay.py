"""`ponder replay FILE`: a run made again, with its tools' recorded results; the exit code says if it agrees."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app.answering.reasoning_config import ReasoningResolver
from app.answering.served_model import ServedModel
from app.config import BadSetting, Settings
from app.runs.trace import BadTrace, Replayed, Trace, doubts, replay
from engine import Engine


def run(file: Path, settings: Settings, force: bool) -> int:
    """0: the same tokens; 1: others, printed on standard output. With `force`, also on other numerics than the run had.

    Raises:
        BadSetting: the file is no trace, the model cannot be loaded, or it cannot be expected to make the same tokens.
        ApiError: the run's strategy is not there.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            trace = Trace.loads(opened.readline())
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{file} cannot be read: {error}.") from None
    except BadTrace as error:
        raise BadSetting(f"{file}: {error}") from None
    return asyncio.run(_replayed(trace, settings, force))


async def _replayed(trace: Trace, settings: Settings, force: bool) -> int:
    async with await Engine.start(settings.engine_config(), fallback=settings.engine_fallback()) as engine:
        served = ServedModel(engine, settings.model, settings.served_model_name, settings.tool_call_parser)
        if served.name != trace.model:
            print(f"The trace is of {trace.model}, this is {served.name}: other tokens are to be expected.")
        doubted = doubts(trace, served)
        if doubted.other and not force:
            raise BadSetting(
                f"It can't be made again as it was here: {'; '.join(doubted.other)}. "
                "Accepted: the same numerics and model files, or --force to compare nevertheless."
            )
        for reason in (*doubted.other, *doubted.reasons):
            print(f"The tokens may differ: {reason}.")
        made = await replay(served, trace, ReasoningResolver.of_settings(settings))
        print(_comparison(made, served))
    return 0 if made.differs_at is None else 1


def _comparison(made: Replayed, served: ServedModel) -> str:
    if made.differs_at is None:
        return f"{made.tokens} tokens, the same as recorded."
    was, now = (served.engine.tokenizer.decode(ids, skip_special=False) for ids in (made.was, made.now))
    return f"The tokens differ from number {made.differs_at} on: {was!r} was recorded, {now!r} came now."
