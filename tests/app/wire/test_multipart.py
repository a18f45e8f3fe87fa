"""The form parser by itself: however a form is split it is the same, and whatever comes is a form or refused."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.multipart import MAX_FIELD_LENGTH, MAX_PARTS, BadForm, Form

KIND = "multipart/form-data; boundary=edge"
CONTENT = b"\r\n--edg\r\n--edge-\r\n\r\x00" * 3
BODY = (
    b'--edge\r\nContent-Disposition: form-data; name="wait"\r\n\r\n1\r\n'
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n'
    + CONTENT.replace(b"--edge-", b"--edg-")
    + b'\r\n--edge\r\nContent-Disposition: form-data; name="file"; filename="b.txt"\r\n\r\n\r\n--edge--\r\n'
)


@contextmanager
def places() -> Iterator[tuple[Path, Callable[[], Path]]]:
    """A folder, and what gives paths in it."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()
        yield Path(folder), lambda: Path(folder) / str(next(numbers))


def fed(pieces: Sequence[bytes], new_file: Callable[[], Path]) -> Form:
    form = Form(KIND, new_file)
    try:
        for piece in pieces:
            form.feed(piece)
        form.finish()
    except BadForm:
        form.discard()
        raise
    return form


def part(name: str, value: bytes) -> bytes:
    return b'--edge\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)


@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=8))
def test_a_form_is_the_same_however_it_is_split(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(BODY)]
    with places() as (_, new_file):
        form = fed([BODY[a:b] for a, b in itertools.pairwise(edges)], new_file)
        assert form.fields == {"wait": ["1"]}
        contents = [(file.name, file.path.read_bytes()) for file in form.files]
        assert contents == [("a.txt", CONTENT.replace(b"--edge-", b"--edg-")), ("b.txt", b"")]


@given(
    at=st.integers(0, len(BODY)),
    taken=st.integers(0, 40),
    put=st.binary(max_size=20) | st.sampled_from([b"\r\n", b"--edge"]),
)
def test_a_damaged_form_is_a_form_or_refused_and_leaves_nothing(at: int, taken: int, put: bytes) -> None:
    with places() as (folder, new_file):
        try:
            form = fed([BODY[:at] + put + BODY[at + taken :]], new_file)
        except BadForm:
            pass
        else:
            form.discard()
        assert list(folder.iterdir()) == []


def test_files_that_were_handed_over_stay() -> None:
    with places() as (folder, new_file):
        form = fed([BODY], new_file)
        assert form.hand_over(lambda: "taken") == "taken"
        form.discard()
        assert len(list(folder.iterdir())) == 2


def test_files_that_nobody_could_take_go() -> None:
    with places() as (folder, new_file):
        form = fed([BODY], new_file)
        with pytest.raises(ZeroDivisionError):
            form.hand_over(lambda: 1 // 0)
        form.discard()
        assert list(folder.iterdir()) == []


def test_a_field_is_not_held_beyond_its_limit() -> None:
    with places() as (_, new_file):
        assert (
            len(fed([part("a", b"x" * MAX_FIELD_LENGTH) + b"--edge--\r\n"], new_file).fields["a"][0])
            == MAX_FIELD_LENGTH
        )
        with pytest.raises(BadForm, match=str(MAX_FIELD_LENGTH)) as refused:
            fed([part("a", b"x" * (MAX_FIELD_LENGTH + 1))], new_file)
        assert refused.value.field == "a"


def test_parts_are_counted() -> None:
    with places() as (_, new_file), pytest.raises(BadForm, match=str(MAX_PARTS)):
        fed([part("a", b"")] * (MAX_PARTS + 1), new_file)


def test_names_are_utf8_or_else_latin_1() -> None:
    with places() as (_, new_file):
        body = '--edge\r\nContent-Disposition: form-data; name="file"; filename="süß.txt"\r\n\r\n\r\n--edge--\r\n'
        names = [fed([body.encode(encoding)], new_file).files[0].name for encoding in ("utf-8", "latin-1")]
        assert names == ["süß.txt", "süß.txt"]
