"""The public web, within limits: pages fetched without reaching anything private, and a search engine asked."""

from tools.web.errors import Failed, FetchError, Refused
from tools.web.fetch import FetchConfig, Fetcher, Page

__all__ = ["Failed", "FetchConfig", "FetchError", "Fetcher", "Page", "Refused"]
