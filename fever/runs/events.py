"""TensorBoard's event file, written without TensorBoard: one record per row of metrics, and the run's settings.

A record is a length, a message, and a checksum of each. The message is a protocol buffer with so few fields that
encoding them here is shorter than a dependency, and starts a tenth of a second sooner.

Settings are records of the plugin HParams (tensorboard/plugins/hparams/plugin_data.proto): one when the run begins, and
one when it ends. The third kind, which lists the settings of a whole folder of runs, is left out: TensorBoard takes the
first that it finds for all runs, and those of another algorithm would lose their settings. Without it, it takes the
settings of all.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig
from fever.runs.disk import Appender, Disk


def _table() -> list[int]:
    """The table of CRC-32C: the checksum of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC = _table()
START, END = "_hparams_/session_start_info", "_hparams_/session_end_info"  # tags of the plugin
START_FIELD, END_FIELD = 3, 4  # of its message, HParamsPluginData
SUCCESS, FAILURE = 1, 2  # its Status
NO_TENSOR = bytes([0x08, 1, 0x12, 2, 0x12, 0])  # a TensorProto: DT_FLOAT, of shape [0]
DESCRIBED = ("env", "algo", "workers", "envs", "device", "start_from")  # fields of a run that TensorBoard shows


class EventWriter:
    """One event file in a folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        name = f"{layout.EVENTS}.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appender(folder / name, disk, lines=False)
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one event with these scalars; the file is not buffered."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._record(_double(1, time.time()) + _integer(2, step) + _bytes(5, summary))

    def begin(self, settings: dict[str, Any], group: str) -> None:
        """Append the run's settings: numbers, truth values and texts. TensorBoard shows runs of one `group` in one row,
        with the means of their metrics."""
        entries = b"".join(
            _bytes(1, _bytes(1, name.encode(errors="replace")) + _bytes(2, _value(one)))
            for name, one in settings.items()
        )
        self._plugin(START, START_FIELD, entries + _bytes(4, group.encode()) + _double(5, time.time()))

    def end(self, success: bool) -> None:
        """Append how the run has ended."""
        status = _integer(1, SUCCESS if success else FAILURE)
        self._plugin(END, END_FIELD, status + _double(2, time.time()))

    def _plugin(self, tag: str, field: int, message: bytes) -> None:
        plugin = _bytes(1, b"hparams") + _bytes(2, _bytes(field, message))
        value = _bytes(1, tag.encode()) + _bytes(8, NO_TENSOR) + _bytes(9, _bytes(1, plugin))
        self._record(_double(1, time.time()) + _bytes(5, _bytes(1, value)))

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
    try:
        packed = struct.pack("<f", value)
    except (OverflowError, struct.error):  # too large for 32 bits
        packed = struct.pack("<f", math.inf if value > 0 else -math.inf)
    return bytes([field << 3 | 5]) + packed


def _value(value: Any) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(value, bool):
        return _integer(4, value)
    return _double(2, value) if isinstance(value, (int, float)) else _bytes(3, str(value).encode(errors="replace"))


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that TensorBoard shows: numbers, truth values and texts. Those that are not set are left
    out, and so is the seed: runs that differ in it are shown together."""
    values = config.model_dump(mode="json")
    found = {name: values[name] for name in DESCRIBED}
    found |= {f"env_kwargs.{name}": value for name, value in values["env_kwargs"].items()}
    found |= values["settings"]
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(one, (int, float, str)) for one in value):
        return ",".join(map(str, value))  # as on the command line: 64,64
    if isinstance(value, int) and abs(value) > 1 << 1000:  # more than a float holds
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
