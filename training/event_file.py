"""Event files as TensorBoard reads them: records of protocol buffers, few enough kinds of them to be spelled here.

Every library that writes them brings TensorFlow or torch along where they are installed.
"""

import secrets
import socket
import struct
import time
from pathlib import Path

VERSION = b"brain.Event:2"
START = 1  # of SessionLog.SessionStatus
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected


class EventFile:
    """An event file, in which steps of earlier files from `first_step` on count no longer.

    Raises:
        OSError: from here and all methods, no room or whatever else the file system objects to.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        directory.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names; the end tells apart those of one second.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{secrets.token_hex(4)}"
        self._path = directory / name
        self._add(_bytes(3, VERSION))
        self._add(_varint(2, first_step) + _bytes(7, _varint(1, START)))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write the numbers of a step, by name."""
        values = (_bytes(1, name.encode()) + b"\x15" + struct.pack("<f", value) for name, value in scalars.items())
        self._add(_varint(2, step) + _bytes(5, b"".join(_bytes(1, value) for value in values)))

    def _add(self, event: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + event
        size = struct.pack("<Q", len(event))
        record = size + _checksum(size) + event + _checksum(event)
        with self._path.open("ab") as file:
            file.write(record)


def _varint(field: int, value: int) -> bytes:
    """Spell a whole number, seven bits a byte, the lowest first."""
    spelled = [field << 3]
    while value > 0x7F:
        spelled.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*spelled, value])


def _bytes(field: int, content: bytes) -> bytes:
    """Spell bytes, text or a message within the message: field with wire type 2, length, content."""
    return bytes([field << 3 | 2]) + _varint(0, len(content))[1:] + content


def _checksum(content: bytes) -> bytes:
    """Return the masked CRC-32C of record files."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


TABLE = [_entry(byte) for byte in range(256)]
