"""The colours of forwards, from the first (dark blue) to the last (yellow).

The scale is matplotlib's viridis: lightness rises with the forward, so the order is visible with
any colour vision and on any terminal. The terminal uses `colours_of_forward`; the pages get the
same constants as data and compute the same colours in `static/site.js`.
"""

from __future__ import annotations

SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # viridis, RGB
LUMINANCE = (0.2126, 0.7152, 0.0722)  # weights of red, green and blue (sRGB)
EVEN_CONTRAST = 0.18  # luminance on which black and white are equally legible (WCAG 2)


def colours_of_forward(forward: int, forwards: int) -> tuple[str, tuple[int, int, int]]:
    """(text colour, background as RGB) of a forward among `forwards`, counted from 0."""
    place = forward / max(forwards - 1, 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    start, end = SCALE[low], SCALE[low + 1]
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(start, end, strict=True))
    pairs = zip(LUMINANCE, (red, green, blue), strict=True)
    light = sum(weight * (value / 255) ** 2.2 for weight, value in pairs)
    return "#000000" if light > EVEN_CONTRAST else "#ffffff", (red, green, blue)
