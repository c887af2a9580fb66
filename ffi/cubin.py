"""What a cubin, an ELF image, says of its kernels' signatures.

The driver copies each parameter by the kernel's own idea of its size, whatever it is given.
"""

from __future__ import annotations

import functools
import struct

__all__ = ["parameter_bytes"]

# ELF64, little endian: where the header has the section table, a section's header, and of it name, offset and size.
_SECTION_TABLE, _SECTION_COUNTS, _SECTION = struct.Struct("<Q"), struct.Struct("<HHH"), struct.Struct("<I20xQQ")
_SECTION_TABLE_AT, _SECTION_COUNTS_AT = 0x28, 0x3A
# Of a section .nv.info: format and number of an attribute, and its value or, of format 4, how many bytes follow. NVIDIA
# documents none of it; cuobjdump calls the two EIATTR_KPARAM_INFO and, above 4 KB, EIATTR_KPARAM_INFO_V2.
_ATTRIBUTE, _SIZED = struct.Struct("<BBH"), 4
_PARAMETER, _LARGE_PARAMETER = 0x17, 0x45
# A parameter's place in the signature, and its size, in the upper 14 bits or whole.
_PLACE_AND_SIZE = struct.Struct("<4xH2xI")


@functools.lru_cache(maxsize=1024)
def parameter_bytes(cubin: bytes, kernel: str) -> tuple[int, ...] | None:
    """The sizes of a kernel's parameters, in the order of its signature; None if the image does not tell.

    Args:
      kernel: the symbol; of a C++ function, the mangled one.
    """
    try:
        info = _section(cubin, f".nv.info.{kernel}")
        return None if info is None else _sizes(info)
    except (struct.error, KeyError, OverflowError):  # No image that we can read: the driver has its own opinion.
        return None


def _sizes(info: bytes) -> tuple[int, ...]:
    sizes = {}
    at = 0
    while at < len(info):
        kind, attribute, value = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        if kind != _SIZED:
            continue
        if attribute in (_PARAMETER, _LARGE_PARAMETER):
            place, size = _PLACE_AND_SIZE.unpack_from(info, at)
            sizes[place] = size >> 18 if attribute == _PARAMETER else size
        at += value
    return tuple(sizes[place] for place in range(len(sizes)))


def _section(image: bytes, name: str) -> bytes | None:
    if image[:5] != b"\x7fELF\x02":
        return None
    (table,) = _SECTION_TABLE.unpack_from(image, _SECTION_TABLE_AT)
    entry_bytes, count, names_index = _SECTION_COUNTS.unpack_from(image, _SECTION_COUNTS_AT)
    sections = [_SECTION.unpack_from(image, table + i * entry_bytes) for i in range(count)]
    _, names, _ = sections[names_index] if names_index < count else (0, 0, 0)
    wanted = name.encode() + b"\0"
    for name_at, start, size in sections:
        if image.startswith(wanted, names + name_at):
            return image[start : start + size]
    return None
