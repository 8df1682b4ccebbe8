"""Features on disk: one float32 file per kind, filled batch by batch, resumable, the same bytes however it was filled.

A folder belongs to one backbone, image set, transform and way of computing; its name is the digest of all these, and
of the bytes of a few images.

    key.json        what the folder belongs to, for people
    changed.npy     (N, 2) times of modification and inodes of the images' files, as they were last seen
    KIND.f32        (N, D) float32, row-major: image i is row i
    KIND.journal    while being filled: one JSON line for every batch whose rows are safely on disk
    KIND.json       once complete: width, checksum and unreadable images; the journal is gone
    lock            held (flock) by the run that fills the folder; the kernel frees it if the run is killed

Batches are fixed by N and the batch size alone, so a continued or divided extraction computes what one run would have.
Letters: N images, D width, B images of a batch.
"""

import io
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.files import locked, write_atomic

COMMIT_EVERY = 1.0  # seconds of work that a kill may cost; a sync of the disk takes milliseconds
ITEM = np.dtype(np.float32).itemsize

Bad = Mapping[int, str]  # index of an unreadable image -> why it is unreadable


@dataclass(frozen=True, kw_only=True)
class Store:
    """The folder of one `key` (JSON facts that decide about the bytes) for `count` images in batches of `batch`."""

    folder: Path
    count: int
    batch: int
    width: int

    @classmethod
    def of(cls, folder: Path, key: Mapping[str, object], count: int, batch: int, width: int) -> "Store":
        """The store of `key` in `folder`, made if need be."""
        if not (folder / "key.json").exists():
            write_atomic(folder / "key.json", json.dumps(key, indent=1, sort_keys=True) + "\n")
        return cls(folder=folder, count=count, batch=batch, width=width)

    @property
    def kinds(self) -> list[str]:
        """The kinds of which there is anything."""
        return [path.stem for path in sorted(self.folder.glob("*.f32"))]

    def clear(self) -> None:
        """Remove all features. What other runs have mapped of them stays with these."""
        for kind in self.kinds:
            for suffix in ("json", "journal", "f32"):
                self.path(kind, suffix).unlink(missing_ok=True)

    def forget_changed(self, changed: np.ndarray) -> None:
        """Forget the batches with images of which the file was overwritten. changed (N, 2): time of modification and
        inode of each file.

        Where all inodes differ the set was copied, and where all times do, by a copy that does not keep them: what the
        images hold is then told by the bytes of a few, which are part of the folder's name.
        """
        path = self.folder / "changed.npy"
        recorded = np.load(path, allow_pickle=False) if path.exists() else changed
        if path.exists() and np.array_equal(recorded, changed):
            return
        copied = (recorded[:, 1] != changed[:, 1]).all()
        is_changed = recorded[:, 0] != changed[:, 0] if copied else (recorded != changed).any(axis=1)
        with self.locked():
            if is_changed.any() and not (copied and is_changed.all()):
                batches = set((np.flatnonzero(is_changed) // self.batch).tolist())
                for kind in self.kinds:
                    kept = {number: bad for number, bad in self.state(kind).items() if number not in batches}
                    write_atomic(self.path(kind, "journal"), "".join(_line(*entry) for entry in kept.items()))
                    self.path(kind, "json").unlink(missing_ok=True)
            buffer = io.BytesIO()
            np.save(buffer, changed)
            write_atomic(path, buffer.getvalue())

    @property
    def batches(self) -> int:
        """How many batches the images make; the last may be short."""
        return -(-self.count // self.batch)

    def span(self, number: int) -> range:
        """The images of batch `number`."""
        return range(number * self.batch, min(self.count, (number + 1) * self.batch))

    def path(self, kind: str, suffix: str) -> Path:
        return self.folder / f"{kind}.{suffix}"

    def state(self, kind: str) -> dict[int, Bad]:
        """Number of every batch on disk -> its unreadable images."""
        state: dict[int, Bad] = {}
        if not self._is_whole(kind):
            return state
        if self.path(kind, "json").exists():
            bad = self.unreadable(kind)
            state = {number: {i: bad[i] for i in self.span(number) if i in bad} for number in range(self.batches)}
        if self.path(kind, "journal").exists():
            for line in self.path(kind, "journal").read_text().splitlines():
                with suppress(ValueError):  # a line that a crash cut off
                    entry = json.loads(line)
                    state[entry["batch"]] = _images(entry["unreadable"])
        return state

    def missing(self, kind: str, skip_bad: bool) -> list[int]:
        """Batches still to do. Without `skip_bad` those with unreadable images are tried again."""
        state = self.state(kind)
        return [n for n in range(self.batches) if n not in state or (state[n] and not skip_bad)]

    def is_finished(self, kind: str) -> bool:
        """Whether every row is on disk and the bytes are still those that were written."""
        whole = self._is_whole(kind) and self.path(kind, "json").exists()
        return whole and not self.path(kind, "journal").exists() and self._is_intact(kind)

    def _is_intact(self, kind: str) -> bool:
        status = self.path(kind, "f32").stat()
        checksum = _checksum(self.path(kind, "f32"), status.st_mtime_ns, status.st_size)
        if checksum == json.loads(self.path(kind, "json").read_text()).get("crc32"):
            return True
        self.path(kind, "json").unlink(missing_ok=True)  # damaged: to be filled again
        return False

    @property
    def size(self) -> int:
        """Bytes of one kind's file."""
        return self.count * self.width * ITEM

    def _is_whole(self, kind: str) -> bool:
        path = self.path(kind, "f32")
        return path.exists() and path.stat().st_size == self.size

    def allocate(self, kinds: Sequence[str]) -> None:
        """Files of full length for `kinds`. Raises ValueError when the disk has no room for them."""
        paths = [self.path(kind, "f32") for kind in kinds]
        lacking = sum(self.size - (path.stat().st_blocks * 512 if path.exists() else 0) for path in paths)
        free = shutil.disk_usage(self.folder).free
        if lacking > free:
            raise ValueError(
                f"features of {self.count} images need {lacking / 2**20:,.1f} MiB in {self.folder}, where "
                f"{free / 2**20:,.1f} MiB are free; make room, or give --out a folder on a larger disk"
            )
        for kind in kinds:
            if not self._is_whole(kind):
                self.path(kind, "json").unlink(missing_ok=True)
                self.path(kind, "journal").unlink(missing_ok=True)
                with open(self.path(kind, "f32"), "wb") as file:
                    file.truncate(self.size)

    def finish(self, kind: str) -> None:
        """Replace the journal by the summary. To be called when no batch is missing."""
        state = self.state(kind)
        assert len(state) == self.batches
        bad = {str(i): why for number in sorted(state) for i, why in sorted(state[number].items())}
        status = self.path(kind, "f32").stat()
        checksum = _checksum(self.path(kind, "f32"), status.st_mtime_ns, status.st_size)
        summary = {"images": self.count, "width": self.width, "crc32": checksum, "unreadable": bad}
        write_atomic(self.path(kind, "json"), json.dumps(summary, indent=1) + "\n")
        self.path(kind, "journal").unlink(missing_ok=True)

    def unreadable(self, kind: str) -> dict[int, str]:
        """Index -> reason, for every image of a finished kind that could not be read."""
        return _images(json.loads(self.path(kind, "json").read_text())["unreadable"])

    def rows(self, kind: str) -> np.ndarray:
        """(N, D) float32, memory-mapped and read-only; rows of unreadable images are zeros."""
        return np.memmap(self.path(kind, "f32"), np.float32, mode="r", shape=(self.count, self.width))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder against other runs; wait, and say so, while another run fills it."""
        return locked(self.folder / "lock", "it extracts the same features")


@lru_cache(maxsize=256)
def _checksum(path: Path, modified: int, size: int) -> int:
    """CRC-32 of a file, computed once for each state (`modified`, in ns, and `size`) of it in a process."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _line(number: int, bad: Bad) -> str:
    """A line of a journal."""
    return json.dumps({"batch": number, "unreadable": {str(i): why for i, why in bad.items()}}) + "\n"


def _images(entry: Mapping[str, str]) -> dict[int, str]:
    return {int(index): why for index, why in entry.items()}  # JSON has no integer keys


@dataclass(kw_only=True)
class Writer:
    """Puts batches of one or several kinds into a store; rows first, journal after they are on disk. Thread-safe."""

    store: Store
    wanted: Mapping[str, set[int]]  # kind -> the batches that it lacks
    _files: dict[str, int] = field(default_factory=dict)
    _uncommitted: dict[int, Bad] = field(default_factory=dict)
    _committed_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Writer":
        self._files = {kind: os.open(self.store.path(kind, "f32"), os.O_WRONLY) for kind in self.wanted}
        return self

    def __exit__(self, *reason: object) -> None:
        # After an error too: what was computed is kept.
        try:
            self._commit()
        finally:
            for file in self._files.values():
                os.close(file)

    def write(self, number: int, rows: Mapping[str, np.ndarray], bad: Bad) -> None:
        """Rows (B, D) of batch `number` for every kind that lacks it."""
        with self._lock:
            for kind in self._lacking(number):
                content = np.ascontiguousarray(rows[kind], np.float32).data.cast("B")
                _write_all(self._files[kind], content, number * self.store.batch * self.store.width * ITEM)
            self._uncommitted[number] = bad
            if time.monotonic() - self._committed_at >= COMMIT_EVERY:
                self._commit()

    def _lacking(self, number: int) -> list[str]:
        return [kind for kind, numbers in self.wanted.items() if number in numbers]

    def _commit(self) -> None:
        for kind, file in self._files.items():
            entries = [_line(number, bad) for number, bad in self._uncommitted.items() if number in self.wanted[kind]]
            if entries:
                os.fsync(file)
                _append(self.store.path(kind, "journal"), "".join(entries))
        self._uncommitted.clear()
        self._committed_at = time.monotonic()


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _append(path: Path, text: str) -> None:
    """Add whole lines to a journal that other processes may be adding to, and that a crash may have cut."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        cut = size and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, (("\n" if cut else "") + text).encode())
        os.fsync(file)
    finally:
        os.close(file)
