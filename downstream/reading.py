"""Files of scenes as the mm libraries' transforms read them; a file that is broken is named in one line."""

from collections.abc import Callable
from typing import Any

from imagesets.decoding import FILE_ERRORS

Results = dict[str, Any]
Transform = Callable[[Results], Results]


class Reading:
    """`transform`, which reads the file that `key` names. ValueError where the file, not the machine, is at fault."""

    def __init__(self, transform: Transform, key: str) -> None:
        self.transform, self.key = transform, key

    def __call__(self, results: Results) -> Results:
        try:
            return self.transform(results)
        except MemoryError:
            raise
        except Exception as error:  # decoders raise whatever a corrupt field leads to: AssertionError, SyntaxError, ...
            if getattr(error, "errno", None) not in {None, *FILE_ERRORS}:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{results[self.key]}: cannot be read ({reason}); replace the file") from error
