"""What a message says of a word that is none of the choices, everywhere in the same words."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

MAX_LISTED = 20  # choices that a message names itself, where something else lists them


def meant(word: str, choices: Mapping[str, str] | Iterable[str], listed_by: str = "", rest: str = "") -> str:
    """The end of a message about an unknown word: `; did you mean 'knn@dino'? there are: knn@dino, linear@mae`.

    choices: the words, or each word with how the message lists it. listed_by: what shows them, in place of a long list.
    rest: what follows the word, such as the path of a URL. Capitals do not matter.
    """
    shown = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    close = closest(word, list(shown))
    likely = f"; did you mean {close + rest!r}?" if close else ";"
    if listed_by and len(shown) > MAX_LISTED:
        return f"{likely} {listed_by} lists them all"
    return f"{likely} there are: {', '.join(shown.values()) or 'none'}"


def closest(word: str, choices: list[str]) -> str:
    """The choice that begins with the word, else the most similar one; "" where none is."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    longer = [choice for choice in by_lower if word and choice.startswith(word.lower())]
    near = longer[-1:] or get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else ""
