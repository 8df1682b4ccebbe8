"""Features on disk: one float32 file per kind, filled batch by batch, resumable, always with the same bytes.

A folder belongs to one backbone, image set, transform, device and precision. Its name is the digest of these and of the
bytes of a few images.

    key.json        what the folder belongs to, for people to read
    changed.npy     (N, 2) modification times and inodes of the images' files when they were last checked
    KIND.f32        (N, D) float32, row-major: row i belongs to image i
    KIND.journal    while the file is being filled: one JSON line for each batch whose rows are safely on disk
    KIND.json       once it is complete, in place of the journal: width, checksum and unreadable images
    lock            locked (flock) by the run that fills the folder; the kernel releases it if the run is killed

Batches depend only on N and the batch size, so that a resumed or shared extraction computes the bits of a single run.

N: images. D: width. B: images of a batch.
"""

import io
import json
import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.files import locked, open_regular, read_json, read_json_lines, read_regular, reserve, write_atomic

COMMIT_EVERY = 1.0  # seconds of work that a kill may lose; syncing the disk takes milliseconds
ITEM = np.dtype(np.float32).itemsize

Unreadable = Mapping[int, str]  # index of an unreadable image -> reason


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of features of `count` images, computed in batches of `batch`."""

    folder: Path
    count: int
    batch: int
    width: int

    @classmethod
    def of(cls, folder: Path, key: Mapping[str, object], count: int, batch: int, width: int) -> "Store":
        """The store in `folder`, which is created if necessary. key: JSON values that the features depend on."""
        if not (folder / "key.json").exists():
            write_atomic(folder / "key.json", json.dumps(key, indent=1, sort_keys=True) + "\n")
        return cls(folder=folder, count=count, batch=batch, width=width)

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds that have a file."""
        return [path.stem for path in sorted(self.folder.glob("*.f32"))]

    def clear(self) -> None:
        """Remove all features. Runs that have mapped the files keep what they mapped."""
        for kind in self.kinds:
            for suffix in ("json", "journal", "f32"):
                self.path(kind, suffix).unlink(missing_ok=True)

    def forget_changed(self, changed: np.ndarray) -> None:
        """Forget batches that contain images whose files were overwritten since they were last checked.

        changed: (N, 2) int64, modification time and inode of each file.

        If all inodes differ, the set was copied, and only modification times are compared. If all of these differ as
        well, the copy did not preserve them; nothing is forgotten then, because the name of the folder depends on the
        bytes of a few images, which are still the same.
        """
        path = self.folder / "changed.npy"
        recorded = np.load(io.BytesIO(read_regular(path)), allow_pickle=False) if path.exists() else changed
        if path.exists() and np.array_equal(recorded, changed):
            return
        is_copy = (recorded[:, 1] != changed[:, 1]).all()
        is_changed = recorded[:, 0] != changed[:, 0] if is_copy else (recorded != changed).any(axis=1)
        with self.locked():
            if is_changed.any() and not (is_copy and is_changed.all()):
                stale = set((np.flatnonzero(is_changed) // self.batch).tolist())
                for kind in self.kinds:
                    valid = {number: bad for number, bad in self.state(kind).items() if number not in stale}
                    write_atomic(self.path(kind, "journal"), "".join(_journal_line(*entry) for entry in valid.items()))
                    self.path(kind, "json").unlink(missing_ok=True)
            buffer = io.BytesIO()
            np.save(buffer, changed)
            write_atomic(path, buffer.getvalue())

    @property
    def batches(self) -> int:
        """Number of batches; the last one may be smaller."""
        return -(-self.count // self.batch)

    def span(self, number: int) -> range:
        """Indices of the images of batch `number`."""
        return range(number * self.batch, min(self.count, (number + 1) * self.batch))

    def path(self, kind: str, suffix: str) -> Path:
        return self.folder / f"{kind}.{suffix}"

    def state(self, kind: str) -> dict[int, Unreadable]:
        """Number of each batch on disk -> its unreadable images."""
        state: dict[int, Unreadable] = {}
        if not self._has_full_size(kind):
            return state
        if self.path(kind, "json").exists():
            reasons = self.unreadable(kind)
            for number in range(self.batches):
                state[number] = {index: reasons[index] for index in self.span(number) if index in reasons}
        if self.path(kind, "journal").exists():
            for entry in read_json_lines(self.path(kind, "journal")):
                state[entry["batch"]] = _with_integer_keys(entry["unreadable"])
        return state

    def missing(self, kind: str, skip_bad: bool) -> list[int]:
        """Numbers of the batches to compute. Unless `skip_bad`, those with unreadable images are tried again."""
        state = self.state(kind)
        return [n for n in range(self.batches) if n not in state or (state[n] and not skip_bad)]

    def is_finished(self, kind: str) -> bool:
        """Whether all rows are on disk, with the bytes that were written."""
        return self._has_full_size(kind) and self._has_summary(kind) and self._has_checksum(kind)

    def _has_summary(self, kind: str) -> bool:
        return self.path(kind, "json").exists() and not self.path(kind, "journal").exists()

    def _has_checksum(self, kind: str) -> bool:
        return self._checksum(kind) == read_json(self.path(kind, "json")).get("crc32")

    def _checksum(self, kind: str) -> int:
        status = self.path(kind, "f32").stat()
        return _checksum(self.path(kind, "f32"), status.st_mtime_ns, status.st_size)

    @property
    def size(self) -> int:
        """Bytes of the file of one kind."""
        return self.count * self.width * ITEM

    def _has_full_size(self, kind: str) -> bool:
        path = self.path(kind, "f32")
        return path.exists() and path.stat().st_size == self.size

    def allocate(self, kinds: Sequence[str]) -> None:
        """Create files of full length for unfinished `kinds`; a damaged file is filled again.

        Only under the lock, as another process may be writing. Raises ValueError if the disk has no room for them.
        """
        for kind in kinds:
            if not self._has_full_size(kind) or (self._has_summary(kind) and not self._has_checksum(kind)):
                for suffix in ("json", "journal", "f32"):
                    self.path(kind, suffix).unlink(missing_ok=True)
        if kinds:
            reserve({self.path(kind, "f32"): self.size for kind in kinds})

    def finish(self, kind: str) -> None:
        """Replace the journal of a kind without missing batches by its JSON file."""
        state = self.state(kind)
        assert len(state) == self.batches
        unreadable = {str(index): why for number in sorted(state) for index, why in sorted(state[number].items())}
        summary = {
            "images": self.count,
            "width": self.width,
            "crc32": self._checksum(kind),
            "unreadable": unreadable,
        }
        write_atomic(self.path(kind, "json"), json.dumps(summary, indent=1) + "\n")
        self.path(kind, "journal").unlink(missing_ok=True)

    def unreadable(self, kind: str) -> dict[int, str]:
        """Index of each unreadable image of a finished kind -> reason."""
        return _with_integer_keys(read_json(self.path(kind, "json"))["unreadable"])

    def rows(self, kind: str) -> np.ndarray:
        """(N, D) float32, memory-mapped and read-only; rows of unreadable images are zeros."""
        return np.memmap(self.path(kind, "f32"), np.float32, mode="r", shape=(self.count, self.width))

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs. Waits, with a message, while another run fills it."""
        return locked(self.folder / "lock", "it extracts the same features")


@lru_cache(maxsize=256)
def _checksum(path: Path, modified: int, size: int) -> int:
    """CRC-32 of a file, computed once per process and state of the file.

    modified: modification time in ns. size: in bytes. They only tell states apart.
    """
    value = 0
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _journal_line(number: int, unreadable: Unreadable) -> str:
    entry = {"batch": number, "unreadable": {str(index): why for index, why in unreadable.items()}}
    return json.dumps(entry) + "\n"


def _with_integer_keys(entry: Mapping[str, str]) -> dict[int, str]:
    return {int(index): why for index, why in entry.items()}  # JSON has no integer keys


@dataclass(kw_only=True)
class Writer:
    """Writes batches of one or several kinds into a store: rows first, then, once they are on disk, the journal.

    Thread-safe. missing: kind -> numbers of its missing batches.
    """

    store: Store
    missing: Mapping[str, set[int]]
    _files: dict[str, int] = field(default_factory=dict)  # kind -> file descriptor
    _uncommitted: dict[int, Unreadable] = field(default_factory=dict)
    _committed_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Writer":
        self._files = {kind: os.open(self.store.path(kind, "f32"), os.O_WRONLY) for kind in self.missing}
        return self

    def __exit__(self, *reason: object) -> None:
        # After an error, too, so that what was computed is kept.
        try:
            self._commit()
        finally:
            for file in self._files.values():
                os.close(file)

    def write(self, number: int, rows: Mapping[str, np.ndarray], unreadable: Unreadable) -> None:
        """Write rows (B, D) of batch `number` for every kind that lacks it."""
        with self._lock:
            for kind, numbers in self.missing.items():
                if number in numbers:
                    content = np.ascontiguousarray(rows[kind], np.float32).data.cast("B")
                    _write_all(self._files[kind], content, number * self.store.batch * self.store.width * ITEM)
            self._uncommitted[number] = unreadable
            if time.monotonic() - self._committed_at >= COMMIT_EVERY:
                self._commit()

    def _commit(self) -> None:
        for kind, file in self._files.items():
            lines = [
                _journal_line(number, unreadable)
                for number, unreadable in self._uncommitted.items()
                if number in self.missing[kind]
            ]
            if lines:
                os.fsync(file)
                _append(self.store.path(kind, "journal"), "".join(lines))
        self._uncommitted.clear()
        self._committed_at = time.monotonic()


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _append(path: Path, text: str) -> None:
    """Append whole lines to a journal to which other processes may append, and whose last line a crash may have cut."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        is_cut = size and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, (("\n" if is_cut else "") + text).encode())
        os.fsync(file)
    finally:
        os.close(file)
