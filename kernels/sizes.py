"""Sizes to pad to: few of them, since a library may keep something for every shape of a product that it has met.

oneDNN keeps about 0.5 MB of machine code for each shape of a bf16 product (measured with AMX), half of it for good
whatever its cache may hold: with as many shapes as steps, memory grows for hours.
"""


def padded(count: int, multiple: int = 1, octave: int = 8) -> int:
    """The least size that holds ``count``: every multiple of ``multiple`` up to ``2 * octave`` of them, from there on
    ``octave`` sizes, evenly spaced, between a size and its double. ``octave``: a power of 2."""
    units = -(-count // multiple)
    step = 1 << max(0, (units - 1).bit_length() - octave.bit_length())
    return -(-units // step) * step * multiple
