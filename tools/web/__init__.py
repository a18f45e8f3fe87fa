"""The public web, within limits: pages fetched without reaching anything private, and a search engine asked."""

from tools.web.fetch import FetchConfig, FetchedPage, Fetcher
from tools.web.target import AddressRefused, FetchError, FetchFailed

__all__ = ["AddressRefused", "FetchConfig", "FetchError", "FetchFailed", "FetchedPage", "Fetcher"]
