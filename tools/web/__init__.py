"""The public web, within limits: pages fetched without reaching anything private, and a search engine asked."""

from tools.web.fetch import FetchConfig, Fetcher, Page
from tools.web.target import Failed, FetchError, Refused

__all__ = ["Failed", "FetchConfig", "FetchError", "Fetcher", "Page", "Refused"]
