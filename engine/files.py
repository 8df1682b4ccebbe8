"""Atomic writes of files and folders (write next to the target, flush, rename), digests, and locks that keep two runs
from doing the same work at once."""

import codecs
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import option
from engine.printing import say

# Errors of flock and lockf on file systems without locks, such as some mounts of Lustre, NFS and FUSE.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

MAX_TEXT = 1 << 28  # bytes of a list or table; ImageNet's 1.28 million training images need 50 MB
MAX_JSON = 1 << 31  # bytes of a JSON file; COCO's annotations of train2017 have 470 MB, Objects365's 1.5 GB

# In the names of temporary folders next to the target: of the new folder, and of one that holds the old one meanwhile.
WRITING, REPLACED = "writing", "replaced"


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Write a file atomically: readers see the old content or all of the new one, even after a crash."""
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
    """Wait until a folder's entries are on disk; without this, a power cut may undo a rename."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_atomic(path: Path | str) -> Iterator[Path]:
    """A new folder to fill, which appears under `path` only if the block succeeds.

    It replaces an older folder there: in one step if the kernel and the file system can exchange two names (Linux 3.15;
    not NFS). Leftovers of killed processes are removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary, lock = _locked_folder(path)
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if not path.exists():
            os.replace(temporary, path)
        elif _exchange(temporary, path):
            _remove(temporary)
        else:
            retired, retired_lock = _locked_folder(path, REPLACED)
            try:
                os.replace(path, retired / path.name)
                os.replace(temporary, path)
                _remove(retired)
            finally:
                os.close(retired_lock)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        os.close(lock)


def _locked_folder(path: Path, purpose: str = WRITING) -> tuple[Path, int]:
    """A new folder next to `path`, and an open handle that locks it until it is closed or this process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{purpose}."))
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed it as a leftover before it was locked
            continue
        try:
            if _lock(handle) is not False:
                return folder, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Try to lock an open folder; returns whether that worked, or None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove the folders that killed processes left next to `path`. An old folder that was moved away, but never
    replaced, is moved back."""
    name = re.compile(rf"\.{re.escape(path.name)}\.({WRITING}|{REPLACED})\.\w{{8}}")  # as mkdtemp makes them
    for leftover in [child for child in path.parent.iterdir() if name.fullmatch(child.name)]:
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a file, or gone by now
            continue
        try:
            if _lock(handle):
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
    """Exchange two names in one step; returns False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    if rename is None:
        return False
    return rename(working_folder, os.fsencode(one), working_folder, os.fsencode(other), exchange) == 0


@contextmanager
def locked(path: Path | str, work: str) -> Iterator[None]:
    """Hold the lock file `path`; if another process holds it, print that this one waits for the same `work`.

    The kernel releases the lock when the process ends, however that happens; the file stays.
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


def _say_no_locks(path: Path | str, error: OSError) -> None:
    """Print that a file system has no locks. Raises `error` if it has another cause.

    Without locks, two runs may do the same work at once. They write the same bytes, so only time is lost.
    """
    if error.errno not in NO_LOCKS:
        raise error
    folder = Path(path).parent
    say(f"{folder} is on a file system without locks ({error.strerror}): run nothing twice at once there", errors=True)


@contextmanager
def locked_or_refused(path: Path | str, refusal: str) -> Iterator[None]:
    """Hold the lock file `path`; ValueError(refusal) if another process holds it.

    Unlike a lock of flock, this one is not inherited by forked processes, so loader processes that outlive a kill do
    not hold it.
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


def read_regular(path: Path | str, most: int = MAX_JSON) -> bytes:
    """The bytes of a regular file. ValueError for any other kind of file, and for more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes, more than the limit of {most:,}")
        return file.read(size)  # read(most) would first reserve memory for `most` bytes


def read_text(path: Path | str, most: int = MAX_TEXT) -> str:
    """The text of a regular file in UTF-8, without a byte order mark. For every list or table from outside.

    Raises:
        ValueError: The file, which the message names, is no regular file, longer than `most` bytes, or not UTF-8.
        OSError: It cannot be opened.
    """
    try:
        return read_regular(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path | str, most: int = MAX_JSON, type: Any = Any) -> Any:
    """The value in a regular JSON file, checked against `type`. For every JSON file from outside.

    Raises:
        ValueError: The file, which the message names, is no regular file, longer than `most` bytes, no JSON, nested
            too deep, or not of the type.
        OSError: It cannot be opened.
    """
    try:
        return _decoded(read_regular(path, most).removeprefix(codecs.BOM_UTF8), type)
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deep for a file of this kind") from error
    except ValueError as error:  # also msgspec's errors
        raise ValueError(f"{path}: {error}") from error


def json_bytes(value: Any) -> bytes:
    """A value as JSON, also with numpy's floats. TypeError for what JSON cannot represent."""
    return msgspec.json.encode(value, enc_hook=plain)


def plain(value: Any) -> float:
    """For msgspec, which does not recognise numpy's float64, a subclass of float."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a regular file, without lines that a kill cut short. Raises as `read_text`."""
    values = []
    for line in read_text(path).splitlines():
        with suppress(ValueError, RecursionError):
            values.append(_decoded(line.encode(), dict[str, Any]))
    return values


def _decoded(content: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=type)
    except msgspec.DecodeError as error:
        if "surrogate" not in str(error):
            raise
        # Python writes bytes of file names that are not UTF-8 as single surrogates, which other readers refuse.
        return msgspec.convert(json.loads(content), type)


def refuse_irregular_files(folder: Path | str, regular: tuple[str, ...] = ()) -> None:
    """ValueError for a pipe, device or socket below a folder: a library that reads the folder could wait for ever.

    regular: endings of names, in lower case, of files that are not looked at.
    """
    files = ((parent, name) for parent, _, names in os.walk(folder) for name in names)
    for path in [os.path.join(*file) for file in files if not file[1].lower().endswith(regular)]:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{path}: a pipe, device or socket, not a regular file")


def reserve(sizes: Mapping[Path, int]) -> None:
    """Make files of one folder as long as `sizes` says (bytes), on disk space of their own, with zeros for what is new.

    A write into a sparse file that is mapped to memory would end the process with SIGBUS on a full disk. ValueError if
    the disk has no room for all files.
    """
    folder = next(iter(sizes)).parent
    needed = sum(size - (path.stat().st_blocks * 512 if path.exists() else 0) for path, size in sizes.items())
    if needed > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"features need {needed / 2**20:,.1f} MiB in {folder}, where {free / 2**20:,.1f} MiB are free; make room, "
            f"or give {option('out')} a folder on a larger disk"
        )
    for path, size in sizes.items():
        with open(path, "ab") as file:
            if os.fstat(file.fileno()).st_blocks * 512 < size:
                os.posix_fallocate(file.fileno(), 0, size)


def sha256_of_file(path: Path | str) -> str:
    """Hex SHA-256 of the bytes of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
