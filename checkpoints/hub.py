"""The Hugging Face hub: its cache alone where it cannot be reached, and folders of transformers from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download

from checkpoints.transformers_folder import PREPARATION, PROCESSOR, is_transformers

FILES = ["config.json", PREPARATION, PROCESSOR, "*.safetensors", "*.safetensors.index.json"]


def transformers_snapshot(place: str) -> Path | None:
    """Folder of a hub repository, `user/name` or `user/name@revision`, that transformers wrote; None for any other.

    Weights are fetched as safetensors alone. Raises ValueError where there is no way to the hub.
    """
    name, _, revision = place.partition("@")
    try:
        with cache_alone_if_unreachable():
            config = Path(hf_hub_download(name, "config.json", revision=revision or None))
            if not is_transformers(config.parent):
                return None
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=FILES))
    except ConnectionError as error:
        raise ValueError(f"hf-hub:{place} cannot be fetched: {error}") from error
    except (OSError, ValueError, RuntimeError):  # what is wrong with the name is for timm to say
        return None


@contextmanager
def cache_alone_if_unreachable() -> Iterator[None]:
    """Where there is no way to the hub, only what its cache holds is taken: its client would try for minutes.

    Raises ConnectionError for what is not there.
    """
    if constants.HF_HUB_OFFLINE or _is_reachable():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"there is no connection to {constants.ENDPOINT}, and its cache {constants.HF_HUB_CACHE} does not hold the "
            "weights; connect, or name a file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of any type: they are those of the hub's own client
        return False
    return True
