"""Image files of more than 8 bits: one gray picture in every format that defines white, and files that do not."""

import io
import struct
import zlib
from functools import partial

import numpy as np
from PIL import Image, TiffImagePlugin

GREY = np.random.RandomState(0).randint(0, 256, (12, 16)).astype(np.uint8)  # the picture in 8 bits
LOW = np.random.RandomState(1).randint(0, 256, GREY.shape).astype(np.uint16)  # lower 8 bits, to reveal rounding
SIXTEEN = GREY.astype(np.uint16) * 256 + LOW
TWELVE = SIXTEEN >> 4


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def packed_tiff() -> bytes:
    """12 bits a pixel, which Pillow reads but does not write: two values in three bytes (TIFF 6.0, BitsPerSample)."""
    first, second = TWELVE.reshape(-1, 2).T.astype(np.uint32)
    content = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8).tobytes()
    return tiff_file((12,), 1, content)


def tiff_file(bits: tuple[int, ...], photometric: int, content: bytes, compression: int = 1) -> bytes:
    """A TIFF of one strip, with the pixels of GREY's size in `content`. bits: of each channel."""
    height, width = GREY.shape
    entries = {256: width, 257: height, 258: bits[0], 259: compression, 262: photometric, 273: 0, 277: len(bits)}
    entries |= {278: height, 279: len(content)}
    end = 8 + 2 + 12 * len(entries) + 4  # of the directory; several numbers of bits follow it, and then the pixels
    several_bits = struct.pack(f"<{len(bits)}I", *bits) if len(bits) > 1 else b""
    entries |= {273: end + len(several_bits)} | ({258: end} if several_bits else {})
    counts = {258: len(bits)}
    directory = b"".join(struct.pack("<HHII", tag, 4, counts.get(tag, 1), value) for tag, value in entries.items())
    header = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    return header + directory + struct.pack("<I", 0) + several_bits + content


def tiff(pixels: np.ndarray, **tags: int) -> bytes:
    return encoded(Image.fromarray(pixels), "TIFF", tiffinfo={getattr(TiffImagePlugin, k): v for k, v in tags.items()})


def deep_colours(bits: int) -> np.ndarray:
    """Colours (12, 16, 3) uint16 of up to so many bits."""
    return np.random.RandomState(2).randint(0, 1 << bits, (*GREY.shape, 3)).astype(np.uint16)


def colour_png(colour_type: int, bits: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write. colour_type: 2 RGB, 4 grey with alpha, 6 RGBA."""
    colours = deep_colours(bits)
    pixels = {2: colours, 4: colours[..., :2], 6: np.concatenate([colours, colours[..., :1]], -1)}[colour_type]
    if colour_type in (4, 6):
        pixels[..., -1] = 65535
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    height, width = GREY.shape
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def colour_tiff(bits: int, compression: int) -> bytes:
    """An RGB TIFF of 16 bits a channel, which Pillow does not write. compression: 1 for none, 8 for deflate."""
    content = deep_colours(bits).tobytes()
    return tiff_file((16, 16, 16), 2, zlib.compress(content) if compression == 8 else content, compression)


def deep_grey_png(bits: int) -> bytes:
    return encoded(Image.fromarray(SIXTEEN >> (16 - bits)), "PNG")


# Colours of up to `bits` bits in files of 16.
DEEP_COLOUR = {
    "rgb.png": partial(colour_png, 2),
    "grey-alpha.png": partial(colour_png, 4),
    "rgba.png": partial(colour_png, 6),
    "raw.tif": partial(colour_tiff, compression=1),
    "deflate.tif": partial(colour_tiff, compression=8),
    "ppm": lambda bits: b"P6 16 12 65535\n" + deep_colours(bits).astype(">u2").tobytes(),
}
SCALED = {
    "png": encoded(Image.fromarray(SIXTEEN), "PNG"),
    "tif": encoded(Image.fromarray(SIXTEEN), "TIFF"),
    "big-endian.tif": encoded(Image.fromarray(SIXTEEN.astype(">u2")), "TIFF"),
    "12.tif": packed_tiff(),
    "pgm": b"P5 16 12 65535\n" + SIXTEEN.astype(">u2").tobytes(),
    "jp2": encoded(Image.fromarray(SIXTEEN), "JPEG2000"),
}
# White is the maximum in the header of the file; Pillow scales by it.
BY_HEADER = {
    "12.pgm": b"P5 16 12 4095\n" + TWELVE.astype(">u2").tobytes(),
    "text.pgm": b"P2 16 12 4095\n" + " ".join(map(str, TWELVE.ravel())).encode(),
}
WITHOUT_WHITE = {
    "float.tif": tiff((SIXTEEN / 65535).astype(np.float32)),
    "32.tif": tiff(SIXTEEN.astype(np.int32)),
    "signed.tif": tiff(SIXTEEN, SAMPLEFORMAT=2),
    "inverted.tif": tiff(SIXTEEN, PHOTOMETRIC_INTERPRETATION=0),
    "pfm.ppm": b"Pf 16 12 -1.0\n" + (SIXTEEN / 65535).astype("<f4").tobytes(),
}
