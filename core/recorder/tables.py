"""The tables of a recorder as NumPy records: all rows of a page can be looked at at once. The bytes are layout.py's."""

from __future__ import annotations

import numpy

from . import layout

FRAMES = numpy.dtype(
    [
        ("module", "<u4"),
        ("parent", "<u4"),
        ("depth", "<i2"),
        ("phase", "u1"),
        ("collectives", "u1"),
        ("seq", "<i8"),
        ("first", "<u4"),
        ("count", "<u4"),
        ("index", "<u4"),
    ]
)
ROWS = numpy.dtype(
    [("slot", "<u4"), ("value", "<u4"), ("shape", "<u4"), ("dtype", "u1"), ("kind", "u1"), ("mark", "<u2")]
)
VALUES = numpy.dtype([("low", "<i8"), ("high", "<i8"), ("meta", "<i8")])
assert (FRAMES.itemsize, ROWS.itemsize, VALUES.itemsize) == (layout.FRAME.size, layout.ROW.size, layout.VALUE.size)
