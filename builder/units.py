"""Bytes as people write and read them."""

import re
from decimal import Decimal

from trtforge.plugins.errors import InvalidArgument

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(text: str) -> int:
    """`8GiB` and `8G` are 8 * 2^30, `8GB` is 8 * 10^9, a plain number is bytes. Raises InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB|B|)", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise InvalidArgument(f"{text!r} is not a number of bytes; write it like 8GiB, 8GB or 8589934592")
    number, unit, suffix = match[1], match[2].upper(), match[3].upper()
    return int(Decimal(number) * (_DECIMAL[unit] if suffix == "B" and unit else _FACTORS[unit]))


def format_bytes(count: float) -> str:
    """`513 MB`, `1.2 GB`: decimal units, three digits at most."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
