"""Tests what a fetch may ask for: every spelling of a private address is refused, and plain public ones are not."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.web import AddressRefused
from tools.web.target import embedded, refusal, target

_PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.255.255.254
168.63.129.16 169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1
192.168.0.1 192.168.255.255 198.18.0.1 198.19.255.255 198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.250 240.0.0.1
255.255.255.254 255.255.255.255 :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:7f00:1
::ffff:0:127.0.0.1 64:ff9b::127.0.0.1 64:ff9b::8.8.8.8 64:ff9b:1::10.0.0.1 64:ff9b:1:ffff::1 100::1 100:0:0:1::1
2001::1 2001:0:4136:e378:8000:63bf:80ff:fffe 2001:2::1 2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a00:1::1
2002:808:808::1 3fff::1 5f00::1 fc00::1 fd00:ec2::254 fd12:3456:789a::1 fe80::1 febf::1 fec0::1 ff02::1 ff0e::1
4000::1 e000::1 1::1 200::1 2600:1234::5efe:127.0.0.1 2600:1234::200:5efe:10.0.0.1
"""
_PUBLIC = (
    "1.1.1.1 8.8.8.8 93.184.215.14 172.32.0.1 100.128.0.1 192.167.255.255 2606:4700::1111 2a00:1450::8 2001:4860::8888"
)

_SPELLINGS = """
http://127.0.0.1/ http://127.1/ http://127.0.1/ http://0x7f000001/ http://0x7f.0.0.1/ http://0X7F.1/
http://2130706433/ http://0177.0.0.1/ http://017700000001/ http://0/ http://0x0/ http://00000000177.1/
http://127.0.0.1./ http://①②⑦.0.0.1/ http://１２７.０.０.１/ http://127。0。0。1/ http://127｡0｡0｡1/ http://0x7f.0x0.0x0.0x1/
http://3232235777/ http://0xa9fea9fe/ http://2852039166/ http://169.254.43518/ http://0251.0376.0251.0376/
http://[::ffff:127.0.0.1]/ http://[0:0:0:0:0:ffff:7f00:1]/ http://[::1]/ http://[::]/ http://[fe80::1%25eth0]/
http://[fe80::1%eth0]/ http://[::1%251]/ http://[64:ff9b::7f00:1]/ http://[2002:7f00:1::]/ http://%31%32%37.0.0.1/
http://127.0.0.1%2f/ http://localhost/ http://LOCALHOST/ http://localhost./ http://LocalHost/ http://a.localhost/
http://localhost.localdomain/ http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/ http://printer.local/ http://db.internal/
http://metadata.google.internal/ http://router.home.arpa/ http://nas.lan/ http://intranet/ http://host/
http://127.0.0.1../ http://site..com/ http://.com/ http://1.2.3.4.5/ http://256.1.1.1/ http://1.2.3.08/ http://0x/
http://127.0.0.0x/ http://a.0x7f/ http://site.123/ http://127.0.0.1:80@site.com/ http://user@site.com/
http://user:word@site.com/ http://@127.0.0.1/ http://site.com:22/ http://site.com:8080/ http://site.com:0/
http://site.com:99999/ http://site.com:-80/ http://site.com:8o/ http://site.com:80:80/ http:///path http://[::1/
http://::1/ http://[1.2.3.4]/ http:127.0.0.1/ http:/127.0.0.1/ //127.0.0.1/ 127.0.0.1 site.com ftp://site.com/
file:///etc/passwd gopher://site.com/ data:text/plain,hi javascript:1 jar:http://site.com/ unix:///run/x.sock
http://site.com\\@127.0.0.1/ http:\\\\127.0.0.1/ http://-site.com/ http://xn--/ http://exa\u00admple.com/
http://site.com\u200b/ http://134744072/ http://0x08080808/ http://8.8.2056/ http://010.8.8.8/ http://site.onion/
http://site.test/ http://1.0.0.127.in-addr.arpa/
"""


@pytest.mark.parametrize("address", _PRIVATE.split())
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert refusal(ip_address(address))


@pytest.mark.parametrize("address", _PUBLIC.split())
def test_a_public_address_is_allowed(address: str) -> None:
    assert refusal(ip_address(address)) is None


def test_an_address_of_one_link_is_refused() -> None:
    assert refusal(IPv6Address("2606:4700::1%eth0"))


@pytest.mark.parametrize("url", _SPELLINGS.split())
def test_a_spelling_that_could_lead_astray_is_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        target(url)


@pytest.mark.parametrize(
    "url", ["http://si te.com/", "http://site.com/\r\nHost: a", "http://site.com/\0", "h\tttp://a.com"]
)
def test_a_url_with_spaces_or_control_characters_is_refused(url: str) -> None:
    with pytest.raises(AddressRefused, match="percent-encoded"):
        target(url)


@pytest.mark.parametrize("url", ["http://user@site.com/", "http://a:b@site.com/", "http://site.com:80@127.0.0.1/"])
def test_a_url_with_a_user_is_refused_as_such(url: str) -> None:
    with pytest.raises(AddressRefused, match="a user name or a password"):
        target(url)


def test_a_refusal_says_what_an_odd_number_means_and_what_is_accepted() -> None:
    with pytest.raises(
        AddressRefused, match="'0x7f000001' means 127.0.0.1 and is loopback; accepted: addresses of the public"
    ):
        target("http://0x7f000001/")
    with pytest.raises(AddressRefused, match="odd spelling of 8.8.8.8"):
        target("http://134744072/")


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("https://site.com", "site.com", 443, "/"),
        ("HTTP://Site.COM./a/../b?q=1 2".replace(" ", "%20"), "site.com", 80, "/a/../b?q=1%202"),
        ("https://bücher.de/straße?ü=é#part", "xn--bcher-kva.de", 443, "/stra%C3%9Fe?%C3%BC=%C3%A9"),
        ("http://8.8.8.8/", "8.8.8.8", 80, "/"),
        ("http://[2606:4700:0::1111]/", "2606:4700::1111", 80, "/"),
        ("http://site.com:443/", "site.com", 443, "/"),
        ("http://a_b.site.com/", "a_b.site.com", 80, "/"),
    ],
)
def test_a_plain_url_is_read(url: str, host: str, port: int, path: str) -> None:
    read = target(url)
    assert (read.host, read.port, read.path) == (host, port, path)


def test_what_is_read_reads_the_same_again() -> None:
    for url in ("https://bücher.de/ß", "http://[2606:4700::1111]:443/x", "https://site.com/?a=b%26c"):
        once = target(url)
        assert target(once.url) == once


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{:d}", "0x{:x}", "0{:o}"]))
def test_a_number_is_read_as_the_system_reads_it(value: int, form: str) -> None:
    written = form.format(value)
    address = IPv4Address(socket.inet_aton(written))
    with pytest.raises(AddressRefused) as caught:  # one number is never the plain spelling
        target(f"http://{written}/")
    assert str(address) in str(caught.value) or written == "0"


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_an_embedded_address_is_found_in_every_form(address: IPv4Address) -> None:
    n = int(address)
    forms = [
        (0xFFFF << 32) | n,
        (0x2002 << 112) | (n << 80),
        (0x0064FF9B << 96) | n,
        (0x20010000 << 96) | (n ^ 0xFFFF_FFFF),
    ]
    for form in (*forms, (0x2600 << 112) | (0x5EFE << 32) | n):
        assert embedded(IPv6Address(form)) == address and refusal(IPv6Address(form))


@given(st.integers(0, 2**128 - 1).map(IPv6Address))
def test_nothing_beyond_global_unicast_is_allowed(address: IPv6Address) -> None:
    assert refusal(address) or int(address) >> 125 == 1
