"""Errors of the engine, each with the fault, the limit, and the accepted values."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. `code` is stable and meant for programs."""

    code = "engine_error"


class InvalidParameter(EngineError, ValueError):
    """A sampling or span parameter is out of range. `name` is the parameter."""

    code = "invalid_parameter"

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class ContextLengthExceeded(EngineError, ValueError):
    """The sequence, alone or with the tokens requested of it, can never fit the context or the KV pool."""

    code = "context_length_exceeded"


class QueueFull(EngineError):
    """Too many sequences wait already. `retry_after_s` is an estimate of when to try again."""

    code = "queue_full"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SequenceClosed(EngineError):
    """The handle, or a scope around it, was closed, timed out or its engine stopped."""

    code = "sequence_closed"


class DeadlineExceeded(SequenceClosed):
    """The sequence's deadline has passed, and what was asked for needs the engine."""

    code = "deadline_exceeded"


class FollowerClosed(EngineError):
    """Another sequence of the span's mixture closed before the span was over; those left end with the last piece."""

    code = "follower_closed"


class SequenceBusy(EngineError):
    """A span or a score runs on this handle; wait for it or cancel it first."""

    code = "sequence_busy"


class EngineStopped(EngineError):
    """The engine is not running: it was stopped, or its core failed."""

    code = "engine_stopped"


class EngineRestarting(EngineStopped):
    """The engine's process died. It is being started again, or has been without this request; a retry may succeed."""

    code = "engine_restarting"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankDied(EngineStopped):
    """A process of a model that runs on several ranks ended, so no step of the model can."""

    code = "rank_died"


class InvalidImage(EngineError, ValueError):
    """An image is too large, damaged or of a format that is not read; the message says which."""

    code = "invalid_image"


class BadSnapshot(EngineError, ValueError):
    """The bytes are no snapshot that this engine can resume; the message says why."""

    code = "bad_snapshot"


class CheckpointError(EngineError):
    """A model directory is missing, incomplete or inconsistent; the message says which file and why."""

    code = "checkpoint_error"


class UnsupportedArchitecture(CheckpointError):
    """The checkpoint's architecture, or an option of it, is not one that this engine can run exactly."""

    code = "unsupported_architecture"

    def __init__(self, found: str, supported: Iterable[str]) -> None:
        stems = {_stem(name): name for name in supported}
        near = difflib.get_close_matches(_stem(found), stems, 1)
        hint = f"; the nearest is {stems[near[0]]}" if near else ""
        super().__init__(f"architecture {found!r} is not supported{hint}; supported: {', '.join(sorted(supported))}.")


def _stem(architecture: str) -> str:
    return architecture.partition("For")[0].partition(" ")[0].lower()


class TrainingDiverged(EngineError):
    """A loss or a gradient of fine-tuning is not a finite number; the message has the step and what to change."""

    code = "training_diverged"


class ChatTemplateError(EngineError, ValueError):
    """The model has no chat template, or its template refused the messages; the message says which."""

    code = "chat_template_error"


_LISTED = 20  # names in an error


def unknown_adapter(name: str, known: Collection[str]) -> str:
    """Returns the error that a name is none of those known, of which it lists the first."""
    accepted = ", ".join(sorted(known)[:_LISTED]) or "none is loaded"
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"adapter is {name!r:.200}, which is not loaded; accepted: {accepted}{more}."
