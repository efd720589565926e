"""Sizes in bytes, as numbers or as text."""

import operator
import re
from typing import SupportsIndex

Size = SupportsIndex | str

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power


def to_bytes(name: str, size: Size) -> int:
    """24_000_000_000 for "24GB", 25_769_803_776 for "24GiB". `name` is the option's, for errors.

    Raises ValueError for what is no size and for negative numbers, TypeError for other types.
    """
    if isinstance(size, bool):
        raise TypeError(f"ebb: {name} is {size}, and must be bytes: an int, or text such as '24GB' or '512 MiB'")
    if not isinstance(size, str):
        try:
            number = operator.index(size)
        except TypeError:
            raise TypeError(
                f"ebb: {name} is {size!r}, and must be bytes: an int, or text such as '24GB' or '512 MiB'"
            ) from None
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"ebb: {name} is {size!r}, which is no size: write '24GB' (10^9), '24GiB' (2^30) or bytes")
        number = round(float(match[1]) * unit)
    if not 0 <= number < 2**64:
        raise ValueError(f"ebb: {name} is {number} bytes, and must be at least 0 and below 2^64")
    return number
