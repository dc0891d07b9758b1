"""The pixels of the built-in scenes: a scene drawn with jitter, shade and noise, and pictures of nothing.

Pictures are ``IMAGE_SIZE`` pixels square, RGB. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from mmclip.data.scenes.world import Scene, Thing

IMAGE_SIZE = 48
_SUPERSAMPLE = 4  # drawn this much larger, then averaged down: smooth edges
_SIDE = IMAGE_SIZE * _SUPERSAMPLE
_RGB = {
    "red": (225, 40, 40),
    "orange": (250, 140, 20),
    "yellow": (245, 230, 50),
    "green": (40, 170, 60),
    "cyan": (70, 215, 225),
    "blue": (50, 80, 230),
    "purple": (160, 50, 190),
}
_FOREIGN_RGB = ((250,) * 3, (15,) * 3, (240, 160, 190), (110, 70, 40), (190, 180, 140))  # no caption names these
_RADIUS = {"small": (0.068, 0.085), "large": (0.125, 0.145)}  # fractions of the picture's side
_PLACES = {"left": (0.22, 0.5), "right": (0.78, 0.5), "top": (0.5, 0.22), "bottom": (0.5, 0.78), "middle": (0.5, 0.5)}
NOTHING_KINDS = ("blank", "noise", "stripes", "gradient", "blobs", "foreign")


def draw_picture(rng: np.random.Generator, scene: Scene) -> Image.Image:
    """The scene on a background of its own: two calls with different generators give two pictures of it."""
    canvas = _background(rng)
    draw = ImageDraw.Draw(canvas)
    for thing, (x, y) in zip(scene.things, _centres(rng, scene), strict=True):
        low, high = _RADIUS[thing.size or "large"]
        _draw_thing(draw, rng, thing, x * _SIDE, y * _SIDE, rng.uniform(low, high) * _SIDE)
    return _finish(rng, canvas)


def draw_nothing(rng: np.random.Generator, kind: str) -> Image.Image:
    """A picture that no caption describes: one of ``NOTHING_KINDS``; "foreign" shows unnamed shapes and colours."""
    if kind == "noise":
        pixels = rng.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        return Image.fromarray(pixels)
    canvas = _background(rng)
    draw = ImageDraw.Draw(canvas)
    if kind == "stripes":
        shade, period = int(rng.integers(120, 200)), int(rng.integers(12, 48))
        slant = rng.uniform(-1.0, 1.0) * _SIDE
        for x in range(-2 * _SIDE, 3 * _SIDE, period):
            draw.line((x, 0, x + slant, _SIDE), fill=(shade, shade, shade), width=period // 2)
    elif kind == "gradient":
        ramp = np.linspace(rng.uniform(0, 60), rng.uniform(150, 255), IMAGE_SIZE)
        plane = ramp[None, :, None] if rng.random() < 0.5 else ramp[:, None, None]
        canvas = _enlarged(np.broadcast_to(plane, (IMAGE_SIZE, IMAGE_SIZE, 3)))
    elif kind in ("blobs", "foreign"):
        for _ in range(int(rng.integers(6, 10))):
            x, y = rng.uniform(0.1, 0.9, 2) * _SIDE
            fill = _FOREIGN_RGB[int(rng.integers(len(_FOREIGN_RGB)))]
            _draw_foreign(draw, rng, x, y, rng.uniform(0.07, 0.15) * _SIDE, fill)
        if kind == "blobs":
            canvas = canvas.filter(ImageFilter.GaussianBlur(0.06 * _SIDE))
    return _finish(rng, canvas)


def png_bytes(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()


def _background(rng: np.random.Generator) -> Image.Image:
    """A dark, slightly tinted shade that gets lighter towards one side."""
    base = rng.uniform(20, 85) + rng.uniform(-10, 10, 3)
    slope = rng.uniform(-18, 18, 2)
    ramp = np.linspace(-1.0, 1.0, IMAGE_SIZE)
    plane = slope[0] * ramp[None, :] + slope[1] * ramp[:, None]
    return _enlarged(np.clip(base + plane[:, :, None], 0, 255))


def _enlarged(pixels: np.ndarray) -> Image.Image:
    """[IMAGE_SIZE, IMAGE_SIZE, 3], 0 to 255, as a canvas to draw on."""
    return Image.fromarray(pixels.astype(np.uint8)).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)


def _finish(rng: np.random.Generator, canvas: Image.Image) -> Image.Image:
    """Averaged down to ``IMAGE_SIZE``, with noise of a few grey levels."""
    pixels = np.asarray(canvas.reduce(_SUPERSAMPLE), dtype=np.int16)
    noise = rng.integers(-6, 7, pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _centres(rng: np.random.Generator, scene: Scene) -> list[tuple[float, float]]:
    """(x, y) of each thing's centre, 0 to 1, jittered but never so far that a relation becomes doubtful."""
    n = len(scene.things)
    if n == 1:
        places, jitter = [_PLACES[scene.layout]], (0.06, 0.06)
    elif scene.layout == "grid":
        places, jitter = [(0.27 + 0.46 * (i % 2), 0.27 + 0.46 * (i // 2)) for i in range(n)], (0.05, 0.05)
    else:
        steps = [(i + 0.5) / n for i in range(n)]
        along, across = (0.06, 0.14) if n == 2 else (0.012, 0.1)
        row = scene.layout == "row"
        places = [(s, 0.5) if row else (0.5, s) for s in steps]
        jitter = (along, across) if row else (across, along)
    shift = rng.uniform(-1.0, 1.0, (n, 2)) * jitter
    return [(x + dx, y + dy) for (x, y), (dx, dy) in zip(places, shift, strict=True)]


def _draw_thing(
    draw: ImageDraw.ImageDraw, rng: np.random.Generator, thing: Thing, x: float, y: float, r: float
) -> None:
    tint = rng.uniform(-14, 14, 3)
    fill = tuple(int(np.clip(c + t, 0, 255)) for c, t in zip(_RGB[thing.colour or "red"], tint, strict=True))
    box = (x - r, y - r, x + r, y + r)
    if thing.shape == "circle":
        draw.ellipse(box, fill=fill)
    elif thing.shape == "ring":
        draw.ellipse(box, outline=fill, width=max(1, round(0.42 * r)))
    elif thing.shape == "square":
        draw.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=fill)
    elif thing.shape == "triangle":
        draw.polygon([(x, y - r), (x + 1.05 * r, y + 0.85 * r), (x - 1.05 * r, y + 0.85 * r)], fill=fill)
    elif thing.shape == "cross":
        arm = 0.32 * r
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
    else:
        draw.polygon(_star(x, y, 1.15 * r), fill=fill)


def _draw_foreign(
    draw: ImageDraw.ImageDraw, rng: np.random.Generator, x: float, y: float, r: float, fill: tuple[int, int, int]
) -> None:
    """A slice, a lens or a zigzag."""
    kind, turn = int(rng.integers(3)), float(rng.uniform(0, 360))
    if kind == 0:
        draw.chord((x - r, y - r, x + r, y + r), turn, turn + 150, fill=fill)
    elif kind == 1:
        draw.ellipse((x - r, y - 0.4 * r, x + r, y + 0.4 * r), fill=fill)
    else:
        steps = [(x - r + i * r / 2, y + r / 2 * (-1) ** i) for i in range(5)]
        draw.line(steps, fill=fill, width=max(1, round(r / 4)), joint="curve")


def _star(x: float, y: float, r: float) -> list[tuple[float, float]]:
    """The ten corners of a five-pointed star, from the top."""
    corners = []
    for i in range(10):
        radius, angle = r if i % 2 == 0 else 0.45 * r, math.pi * i / 5
        corners.append((x + radius * math.sin(angle), y - radius * math.cos(angle)))
    return corners
