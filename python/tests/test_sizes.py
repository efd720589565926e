import numpy as np
import pytest

import ebb
from ebb._sizes import to_bytes


@pytest.mark.parametrize(
    ("size", "bytes"),
    [
        (0, 0),
        (12345, 12345),
        (np.int64(7), 7),
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("17", 17),
        ("17B", 17),
    ],
)
def test_sizes_are_numbers_or_text(size, bytes):
    assert to_bytes("x", size) == bytes


@pytest.mark.parametrize("size", ["", "GB", "24XB", "24 G", "-1GB", "1e9", "1,5GB", -1, 2**64, "99999999999TB", "２４GB"])
def test_a_size_that_is_none_is_a_value_error_that_names_the_option(size):
    with pytest.raises(ValueError, match="stash_bytes"):
        ebb.Offloader("cpu", stash_bytes=size)


@pytest.mark.parametrize("size", [1.5, True, [1], b"1GB"])
def test_a_size_of_another_type_is_a_type_error_that_names_the_option(size):
    with pytest.raises(TypeError, match="device_budget"):
        ebb.Offloader("cpu", device_budget=size)
