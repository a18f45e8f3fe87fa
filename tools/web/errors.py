"""Why a page was not fetched, in words that a person or a model can act on."""

from __future__ import annotations


class FetchError(Exception):
    """A page could not be had."""


class Refused(FetchError):
    """The address, or what was found there, is not one that may be fetched."""


class Failed(FetchError):
    """The site did not answer, or not in time, or not in HTTP."""
