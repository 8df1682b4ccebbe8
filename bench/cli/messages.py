"""Wording: one line out of any exception (what went wrong, where, what to do about it), and large numbers."""

import errno
import resource
import traceback

from engine.printing import printable

ADVICE = {
    errno.ENOSPC: "free some space and run the same command again to continue",
    errno.EDQUOT: "free some of your quota and run the same command again to continue",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.EROFS: "choose a place that can be written",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "a folder is needed there",
    errno.EISDIR: "a file is needed there",
}


def in_one_line(error: BaseException) -> str:
    """What a person needs to read of `error`: one printable line.

    A ValueError is a message of ours and stands for itself; the type of any other exception is part of its meaning.
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if error.errno in ADVICE:
            text += f"; {ADVICE[error.errno]}"
    elif isinstance(error, ImportError) and "failed to map segment" in str(error):
        text = f"not enough memory to load {error}".removesuffix(": failed to map segment from shared object")
        text += f"; {memory_limit() or 'free some memory'}"
    elif isinstance(error, ImportError):
        text = f"{error}; `bench doctor` says what is missing and how to install it"
    elif isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        text = f"a process that loads images was killed, as happens for lack of memory or of /dev/shm ({error}); fewer "
        text += "--workers need less of both; run the same command again to go on (a pretraining with --resume)"
    elif isinstance(error, ValueError) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return printable(" ".join(text.split()))


def memory_limit() -> str:
    """What limits the memory of this process, and what to do; "" for nothing."""
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return f"the limit is {most / 1e9:.1f} GB (ulimit {option}): raise it, torch's libraries take 6 GB"
    return ""


def traceback_of(error: BaseException) -> list[str]:
    """The lines of its traceback, in which the second and later ones of a message are set in."""
    found = []
    for part in traceback.format_exception(error):
        ours = part.startswith(("Traceback", " ", "\n"))  # otherwise the type of an exception and its message
        line = part.removesuffix("\n")
        found.append(line if ours else line.replace("\n", "\n    "))
    return "\n".join(found).split("\n")


def millions(parameters: int) -> str:
    """`21.7 M parameters`; small counts in full."""
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**5 else f"{parameters} parameters"
