"""Checks which addresses may be fetched: URLs, host names and IP ranges.

A URL is read so strictly that no two programs could read it differently. A host that is a number in any spelling must
be written as four plain decimals; anything else that looks like a number, hides characters or could be taken for
another host is refused. The table of ranges is written out, from the IANA special-purpose registries, because
`ipaddress.is_global` lets several of these through. An address that carries an IPv4 address inside it (NAT64, 6to4,
Teredo, ISATAP, mapped, compatible) is refused for every inner address, for where the packets come out is not ours to
know.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import quote, urljoin, urlsplit

import idna

_V4 = [
    (IPv4Network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "of this network"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a provider's customers (CGNAT)"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "a cloud's metadata service"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "for protocols"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "for name servers' sinks (AS112)"),
        ("192.52.193.0/24", "for multicast relays (AMT)"),
        ("192.88.99.0/24", "for 6to4 relays"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "for name servers' sinks (AS112)"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
    )
]
_V6 = [
    (IPv6Network(network), kind)
    for network, kind in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "an IPv4 address in IPv6 (mapped)"),
        ("::ffff:0:0:0/96", "an IPv4 address in IPv6 (translated)"),
        ("::/96", "an IPv4 address in IPv6 (compatible)"),
        ("64:ff9b::/96", "an IPv4 address in IPv6 (NAT64)"),
        ("64:ff9b:1::/48", "an IPv4 address in IPv6 (local NAT64)"),
        ("100::/64", "a sink"),
        ("100:0:0:1::/64", "a sink"),
        ("2001::/32", "an IPv4 address in IPv6 (Teredo)"),
        ("2001:2::/48", "for benchmarks"),
        ("2001::/23", "for protocols"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "an IPv4 address in IPv6 (6to4)"),
        ("2620:4f:8000::/48", "for name servers' sinks (AS112)"),
        ("3fff::/20", "for documentation"),
        ("5f00::/16", "for segment routing"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
]
_UNICAST = IPv6Network("2000::/3")  # all of IPv6 that is given out
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})  # RFC 5214: the upper half of the interface identifier


def refusal(address: IPv4Address | IPv6Address) -> str | None:
    """Returns the kind of an address that may not be connected to ("loopback"), or None for a public one."""
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _V4 if address in network), None)
    if address.scope_id is not None:
        return "of one link (it names a zone)"
    for network, kind in _V6:
        if address in network:
            inner = embedded(address)
            return f"{kind}, here {inner}" if inner is not None else kind
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        return f"an IPv4 address in IPv6 (ISATAP), here {embedded(address)}"
    return None if address in _UNICAST else "reserved"


def embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address carries, by the standard forms."""
    value = int(address)
    if address in IPv6Network("2002::/16"):
        return IPv4Address((value >> 80) & 0xFFFF_FFFF)
    if address in IPv6Network("2001::/32"):
        return IPv4Address((value & 0xFFFF_FFFF) ^ 0xFFFF_FFFF)  # RFC 4380: written inverted
    last = IPv4Address(value & 0xFFFF_FFFF)
    if value > 1 and any(address in IPv6Network(n) for n in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96")):
        return last
    if any(address in IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48")):
        return last
    return last if (value >> 32) & 0xFFFF_FFFF in _ISATAP else None


class FetchError(Exception):
    """A page could not be had."""


class AddressRefused(FetchError):
    """The address, or its content, may not be fetched."""


class FetchFailed(FetchError):
    """The site did not answer, or not in time, or not in HTTP."""


MAX_LENGTH = 2048  # characters of a URL
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
_PATH = "/%:@!$&'()*+,;=~-._[]|"  # kept as written; all else is percent-encoded
_LOCAL = ("localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp", "private", "home.arpa")
_NOWHERE = ("test", "invalid", "onion", "alt", "arpa")


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a request: `host` is ASCII and lower case, without brackets or a trailing dot."""

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
        """Returns where a redirect leads.

        Raises:
            Refused: as `target` does.
        """
        _check_characters(location)
        try:
            joined = urljoin(self.url, location)
        except ValueError:
            raise AddressRefused(f"The redirect to {_shown(location)} is not a URL.") from None
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
        raise AddressRefused(f"{_shown(url)} is not a URL; accepted: http://host/path and https://host/path.") from None
    if parts.scheme not in _DEFAULT_PORTS or not url[len(parts.scheme) :].startswith("://"):
        raise AddressRefused(f"{_shown(url)} is not a web address; accepted: http://host/path and https://host/path.")
    if "@" in parts.netloc:
        raise AddressRefused(f"{_shown(url)} carries a user name or a password; accepted: a URL without.")
    host, port = _split(parts.netloc, url)
    number = _DEFAULT_PORTS[parts.scheme] if port == "" else int(port)
    if number not in ports:
        accepted = " and ".join(str(each) for each in sorted(ports))
        raise AddressRefused(f"Port {number} is not open to fetches; accepted: {accepted}.")
    name, address = _host(host)
    path = quote(parts.path or "/", safe=_PATH) + (f"?{quote(parts.query, safe=_PATH + '/?')}" if parts.query else "")
    return Target(parts.scheme, name, number, path, address)


def _check_characters(url: str) -> None:
    if len(url) > MAX_LENGTH:
        raise AddressRefused(f"The URL has {len(url):,} characters; accepted: at most {MAX_LENGTH:,}.")
    if any(c.isspace() or c == "\\" or unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in url):
        raise AddressRefused(f"{_shown(url)} has spaces, backslashes or hidden characters; write them percent-encoded.")


def _split(netloc: str, url: str) -> tuple[str, str]:
    """Host and port as written."""
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{0,5}))?", netloc)
    if match is None or not match[1]:
        raise AddressRefused(f"{_shown(url)} names no host that can be read; accepted: host or host:port.")
    return match[1], match[2] or ""


def _host(written: str) -> tuple[str, IPv4Address | IPv6Address | None]:
    if written.startswith("["):
        return _bracketed(written)
    if "%" in written:
        raise AddressRefused(f"The host {_shown(written)} is percent-encoded; write its name plainly.")
    # Compatibility forms (①, fullwidth letters, ideographic full stops) are read as the letters they stand for.
    name = unicodedata.normalize("NFKC", written).replace("\u3002", ".").lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _number(written, name, labels)
    try:
        name = idna.encode(name, uts46=True).decode() if not name.isascii() else name
    except (idna.IDNAError, UnicodeError):
        raise AddressRefused(f"The host {_shown(written)} is not a host name.") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise AddressRefused(f"The host {_shown(written)} is not a host name; accepted: letters, digits and hyphens.")
    if _NUMBER.fullmatch(labels[-1]):
        return _number(written, name, labels)
    if len(labels) == 1 or _ends(name, _LOCAL):
        raise AddressRefused(f"The host {_shown(written)} is a name of the local network; accepted: public hosts.")
    if _ends(name, _NOWHERE):
        raise AddressRefused(f"The host {_shown(written)} is under a name that the public web does not have.")
    return name, None


def _ends(name: str, suffixes: Collection[str]) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def _bracketed(written: str) -> tuple[str, IPv6Address]:
    try:
        address = IPv6Address(written[1:-1])
    except ValueError:
        raise AddressRefused(f"The host {_shown(written)} is not an IPv6 address.") from None
    if kind := refusal(address):
        raise AddressRefused(f"The address {_shown(written)} is {kind}; accepted: addresses of the public internet.")
    return str(address), address


def _number(written: str, name: str, labels: list[str]) -> tuple[str, IPv4Address]:
    """A host with a number as its last label can only be an IPv4 address, in one of the spellings `inet_aton` reads."""
    address = _inet_aton(labels)
    if address is None:
        raise AddressRefused(f"The host {_shown(written)} is neither a name nor an IPv4 address.")
    if kind := refusal(address):
        same = "" if written == str(address) else f" means {address} and"
        raise AddressRefused(f"The host {_shown(written)}{same} is {kind}; accepted: addresses of the public internet.")
    if name != str(address):
        raise AddressRefused(f"The host {_shown(written)} is an odd spelling of {address}; write it that way.")
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
