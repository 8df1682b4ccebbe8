"""Image files of more than 8 bits: one gray picture in every format that defines white, and files that do not."""

import io
import struct

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
    height, width = GREY.shape
    entries = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 0, 277: 1, 278: height, 279: len(content)}
    entries[273] = 8 + 2 + 12 * len(entries) + 4  # StripOffsets: the pixels follow the directory
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + directory + struct.pack("<I", 0) + content


def tiff(pixels: np.ndarray, **tags: int) -> bytes:
    return encoded(Image.fromarray(pixels), "TIFF", tiffinfo={getattr(TiffImagePlugin, k): v for k, v in tags.items()})


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
