"""TensorBoard's event file, written without TensorBoard: one record per row of metrics.

A record is a length, a message, and a checksum of each. The message is a protocol buffer with so few fields that
encoding them here is shorter than a dependency, and starts a tenth of a second sooner.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from fever import layout


def _table() -> list[int]:
    """The table of CRC-32C: the checksum of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC = _table()


class EventWriter:
    """One event file in a folder."""

    def __init__(self, folder: Path) -> None:
        name = f"{layout.EVENTS}.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.file = open(folder / name, "ab", buffering=0)  # noqa: SIM115 - open as long as the run is
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one event with these scalars; the file is not buffered."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._record(_double(1, time.time()) + _integer(2, step) + _bytes(5, summary))

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self.file.write(length + _checksum(length) + event + _checksum(event))

    def close(self) -> None:
        self.file.close()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as the format demands: rotated, then offset by a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _integer(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: Any) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)
