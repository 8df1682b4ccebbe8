"""Files that are written whole or not at all (write beside the target, flush, rename), digests, and locks that keep
two runs from doing the same work at once."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from engine.printing import say

# What flock and lockf fail with on file systems that have no locks, such as some mounts of Lustre, NFS and FUSE.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# In the names of folders beside the one that is written: the new one, and what holds the older one meanwhile.
WRITING, REPLACED = "writing", "replaced"


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Write `content` so that a reader, or a crash, never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_folder(path: Path | str) -> None:
    """Wait until the names in a folder are on disk: a file that was renamed may else have none after a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_atomic(path: Path | str) -> Iterator[Path]:
    """A folder that appears under `path` only when the block ends well. An older folder there is replaced, at once
    where the kernel and the file system can exchange two names (Linux 3.15; not NFS). What a killed process left of
    such a folder is removed first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary, held = _held_folder(path)
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if not path.exists():
            os.replace(temporary, path)
        elif _exchange(temporary, path):
            _remove(temporary)
        else:
            retired, held_too = _held_folder(path, REPLACED)
            os.replace(path, retired / path.name)
            os.replace(temporary, path)
            shutil.rmtree(retired)
            os.close(held_too)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        os.close(held)


def _held_folder(path: Path, what: str = WRITING) -> tuple[Path, int]:
    """A new folder beside `path`, and the handle that holds its lock until this process ends, however it does."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{what}."))
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for a leftover before it was held
            continue
        try:
            if _hold(handle) is not False:
                return folder, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _hold(handle: int) -> bool | None:
    """Whether the lock could be taken; None where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove the folders that killed processes left beside `path`. One that was moved away for a new folder, which then
    did not come, is moved back."""
    name = re.compile(rf"\.{re.escape(path.name)}\.({WRITING}|{REPLACED})\.\w{{8}}")  # as mkdtemp makes them
    for leftover in [child for child in path.parent.iterdir() if name.fullmatch(child.name)]:
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a file, or gone by now
            continue
        try:
            if _hold(handle):
                if (leftover / path.name).exists() and REPLACED in leftover.name and not path.exists():
                    os.rename(leftover / path.name, path)
                _remove(leftover)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@contextmanager
def locked(path: Path | str, work: str) -> Iterator[None]:
    """Hold the lock file `path` against other processes; wait, and say so, while another one does the same `work`.

    The kernel frees it when a process ends, however it does; the file stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run: {work} ({path})", errors=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _say_no_locks(path, error)
        yield


def is_locked(path: Path | str) -> bool:
    """Whether a process of this machine holds the lock file `path`, as `locked` does."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        _say_no_locks(path, error)
    return False


def _say_no_locks(path: Path | str, error: OSError) -> None:
    """Say that a file system has no locks. Raises `error` where that is not why.

    Two runs of the same work then write the same bytes twice, so that the work is lost, and not the result.
    """
    if error.errno not in NO_LOCKS:
        raise error
    place = Path(path).parent
    say(f"{place} is on a file system without locks ({error.strerror}): run nothing twice at once there", errors=True)


@contextmanager
def locked_or_refused(path: Path | str, refusal: str) -> Iterator[None]:
    """Hold the lock file `path`; ValueError(refusal) where another process holds it.

    Unlike flock's, this lock does not pass to forked processes: loader processes that outlive a kill do not hold it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(refusal) from error
        except OSError as error:
            _say_no_locks(path, error)
        yield


def open_regular(path: Path | str) -> BufferedReader:
    """Open a file for reading. ValueError for a pipe, a device or a socket, which could block or never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise ValueError("a pipe, device or socket, not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path | str, most: int) -> bytes:
    """The bytes of a regular file. ValueError for other kinds of files, and for more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes, more than the limit of {most:,}")
        return file.read(most)


def sha256_of_file(path: Path | str) -> str:
    """Hex SHA-256 of the bytes of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
