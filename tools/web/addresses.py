"""Which addresses a fetch may connect to: those of the public internet, and no other.

The table is written out, from the IANA special-purpose registries, because `ipaddress.is_global` lets several of these
through. An address that carries an IPv4 address inside it (NAT64, 6to4, Teredo, ISATAP, mapped, compatible) is refused
whatever it carries, for where the packets come out is not ours to know. Knows nothing of names, URLs or sockets.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

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
    """What an address is that may not be connected to ("loopback"), or None for one of the public internet."""
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
