"""Ponder's inference engine, usable alone: `from engine import Engine`.

A program holds live sequences: it opens one, lets it generate spans, forks it, scores continuations and cuts it back,
while the engine batches everything that runs, shares K/V between equal prefixes and recomputes what was evicted.
"""

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    BadSnapshot,
    ChatTemplateError,
    CheckpointError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineStopped,
    FollowerClosed,
    InvalidParameter,
    QueueFull,
    SequenceBusy,
    SequenceClosed,
    UnsupportedArchitecture,
)
from engine.handle import Sequence, SpanStream
from engine.model.tokenizer import Tokenizer
from engine.outputs import FinishReason, Prefill, SpanOutput, SpanResult, Stats, TokenLogprob
from engine.params import GREEDY, MAX_LOGPROBS, RepetitionDetection, Sampling, Span, Speculation, StreamingWindow

__all__ = [
    "GREEDY",
    "MAX_LOGPROBS",
    "BadSnapshot",
    "ChatTemplateError",
    "CheckpointError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStopped",
    "FinishReason",
    "FollowerClosed",
    "InvalidParameter",
    "Prefill",
    "QueueFull",
    "RepetitionDetection",
    "Sampling",
    "Sequence",
    "SequenceBusy",
    "SequenceClosed",
    "Span",
    "SpanOutput",
    "SpanResult",
    "SpanStream",
    "Speculation",
    "Stats",
    "StreamingWindow",
    "TokenLogprob",
    "Tokenizer",
    "UnsupportedArchitecture",
]
