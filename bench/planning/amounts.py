"""Times and sizes as people read them."""

STEPS = ((86400, "d"), (3600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """`4.2 s`, `42 s`, `3.5 min`, `2.1 h`, `4.0 d`"""
    for step, name in STEPS:
        if seconds >= 2 * step:
            return f"{seconds / step:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """`0.4 MB`, `15 MB`, `2.1 GB`"""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def operations(count: float) -> str:
    """`0.03 TFLOP`, `1.5 PFLOP`"""
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"
