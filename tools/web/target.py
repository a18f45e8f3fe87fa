"""A URL, read so strictly that no two programs could read it differently.

What is connected to, what is checked and what the site is told come from one reading. A host that is a number in any
spelling must be written as four plain decimals; anything else that looks like a number, hides characters or could be
taken for another host is refused. Knows nothing of DNS: which addresses are allowed is in `addresses`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote, urljoin, urlsplit

import idna

from tools.web.addresses import refusal
from tools.web.errors import Refused

LONGEST = 2048  # characters of a URL
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
_PATH = "/%:@!$&'()*+,;=~-._[]|"  # kept as written; all else is percent-encoded
_LOCAL = ("localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp", "private", "home.arpa")
_NOWHERE = ("test", "invalid", "onion", "alt", "arpa")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes: `host` is ASCII and lower case, without brackets or a trailing dot."""

    scheme: str
    host: str
    port: int
    path: str  # with the query
    address: IPv4Address | IPv6Address | None  # of a host that is an address itself

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def join(self, location: str, ports: Collection[int]) -> Target:
        """Where a redirect leads.

        Raises:
            Refused: as `target` does.
        """
        _check_characters(location)
        try:
            joined = urljoin(self.url, location)
        except ValueError:
            raise Refused(f"The redirect to {_shown(location)} is not a URL.") from None
        return target(joined, ports)


def target(url: str, ports: Collection[int] = (80, 443)) -> Target:
    """
    Raises:
        Refused: it is not a plain http or https URL of a public host at one of `ports`.
    """
    url = url.strip(" ")
    _check_characters(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise Refused(f"{_shown(url)} is not a URL; accepted: http://host/path and https://host/path.") from None
    if parts.scheme not in _DEFAULT_PORTS or not url[len(parts.scheme) :].startswith("://"):
        raise Refused(f"{_shown(url)} is not a web address; accepted: http://host/path and https://host/path.")
    if "@" in parts.netloc:
        raise Refused(f"{_shown(url)} carries a user name or a password; accepted: a URL without.")
    host, port = _split(parts.netloc, url)
    number = _DEFAULT_PORTS[parts.scheme] if port == "" else int(port)
    if number not in ports:
        accepted = " and ".join(str(each) for each in sorted(ports))
        raise Refused(f"Port {number} is not open to fetches; accepted: {accepted}.")
    name, address = _host(host)
    path = quote(parts.path or "/", safe=_PATH) + (f"?{quote(parts.query, safe=_PATH + '/?')}" if parts.query else "")
    return Target(parts.scheme, name, number, path, address)


def _check_characters(url: str) -> None:
    if len(url) > LONGEST:
        raise Refused(f"The URL has {len(url):,} characters; accepted: at most {LONGEST:,}.")
    if any(c.isspace() or c == "\\" or unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in url):
        raise Refused(f"{_shown(url)} has spaces, backslashes or hidden characters; write them percent-encoded.")


def _split(netloc: str, url: str) -> tuple[str, str]:
    """Host and port as written."""
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{0,5}))?", netloc)
    if match is None or not match[1]:
        raise Refused(f"{_shown(url)} names no host that can be read; accepted: host or host:port.")
    return match[1], match[2] or ""


def _host(written: str) -> tuple[str, IPv4Address | IPv6Address | None]:
    if written.startswith("["):
        return _bracketed(written)
    if "%" in written:
        raise Refused(f"The host {_shown(written)} is percent-encoded; write its name plainly.")
    # Compatibility forms (①, fullwidth letters, ideographic full stops) are read as the letters they stand for.
    name = unicodedata.normalize("NFKC", written).replace("\u3002", ".").lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _number(written, name, labels)
    try:
        name = idna.encode(name, uts46=True).decode() if not name.isascii() else name
    except (idna.IDNAError, UnicodeError):
        raise Refused(f"The host {_shown(written)} is not a host name.") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Refused(f"The host {_shown(written)} is not a host name; accepted: letters, digits and hyphens.")
    if _NUMBER.fullmatch(labels[-1]):
        return _number(written, name, labels)
    if len(labels) == 1 or _ends(name, _LOCAL):
        raise Refused(f"The host {_shown(written)} is a name of the local network; accepted: public hosts.")
    if _ends(name, _NOWHERE):
        raise Refused(f"The host {_shown(written)} is under a name that the public web does not have.")
    return name, None


def _ends(name: str, suffixes: Collection[str]) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def _bracketed(written: str) -> tuple[str, IPv6Address]:
    try:
        address = IPv6Address(written[1:-1])
    except ValueError:
        raise Refused(f"The host {_shown(written)} is not an IPv6 address.") from None
    if kind := refusal(address):
        raise Refused(f"The address {_shown(written)} is {kind}; accepted: addresses of the public internet.")
    return str(address), address


def _number(written: str, name: str, labels: list[str]) -> tuple[str, IPv4Address]:
    """A host whose last label is a number can only be an IPv4 address, in one of the spellings `inet_aton` reads."""
    address = _inet_aton(labels)
    if address is None:
        raise Refused(f"The host {_shown(written)} is neither a name nor an IPv4 address.")
    if kind := refusal(address):
        same = "" if written == str(address) else f" means {address} and"
        raise Refused(f"The host {_shown(written)}{same} is {kind}; accepted: addresses of the public internet.")
    if name != str(address):
        raise Refused(f"The host {_shown(written)} is an odd spelling of {address}; write it that way.")
    return name, address


def _inet_aton(labels: list[str]) -> IPv4Address | None:
    if not 1 <= len(labels) <= 4:
        return None
    numbers = list[int]()
    for label in labels:
        base = 16 if label.startswith("0x") else 8 if len(label) > 1 and label.startswith("0") else 10
        digits = label[2:] if base == 16 else label
        try:
            numbers.append(int(digits, base) if digits else 0)
        except ValueError:
            return None
        if not label.isascii() or "_" in label or numbers[-1] < 0:
            return None
    *leading, last = numbers
    if any(number > 255 for number in leading) or last >= 256 ** (5 - len(numbers)):
        return None
    return IPv4Address(sum(number << (24 - 8 * at) for at, number in enumerate(leading)) + last)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")
