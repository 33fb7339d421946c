import pytest

from trtforge.builder.units import format_bytes, parse_bytes
from trtforge.plugins.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8589934592", 8 << 30),
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8gb", 8 * 10**9),
        ("0.5 MiB", 1 << 19),
        ("1.5KB", 1500),
        ("7B", 7),
        ("1" + "0" * 400, 10**400),
        (f"{2**60 + 1}", 2**60 + 1),
    ],
)
def test_bytes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "8 giga", "-1", "1e9", "8GiBs", "nan"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (9960, "10 kB"),
        (98_000_000, "98 MB"),
    ],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(count) == text
