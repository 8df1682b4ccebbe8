"""Which protocols of a run fit its images and its checkpoints, and which it leaves out, said before it starts."""

from collections.abc import Iterator, Sequence

from bench.cli.messages import in_one_line
from bench.results.record import DataUsed
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.suites import ChosenProtocol
from downstream.data.scenes import layout_of, serves
from engine.tasks import Workspace


def fits(chosen: ChosenProtocol, images: DataUsed) -> bool:
    """Whether a protocol evaluates on a set: a dense one on scenes of its layout, or of one that stands in for it."""
    return serves(images.url, chosen.layout) if chosen.layout else not layout_of(images.url)


def left_out_lines(
    data: Sequence[DataUsed],
    selected: Sequence[ChosenProtocol],
    checkpoints: Sequence[LoadedCheckpoint],
    space: Workspace,
) -> Iterator[str]:
    """What a run leaves out and why, a line for each reason. ValueError if nothing is left of a set or a checkpoint."""
    lacking = without_data(data, selected)
    if lacking:
        tasks = ", ".join(dict.fromkeys(chosen.key for chosen in lacking))
        yield f"{len(lacking)} protocols are left out, none of the --data is for them: {tasks}"
    for name, refused in left_out(data, selected, space).items():
        yield f"{name} has several labels an image, so these are left out on it: {', '.join(refused)}"
    for checkpoint in checkpoints:
        reasons = refused_networks(checkpoint, [chosen for chosen in selected if chosen not in lacking])
        name = checkpoint.used.name
        yield from (f"{name} is evaluated without {', '.join(names)}: {reason}" for reason, names in reasons.items())


def without_data(data: Sequence[DataUsed], selected: Sequence[ChosenProtocol]) -> list[ChosenProtocol]:
    """Protocols for which no image set is given. ValueError if that is all of them."""
    lacking = [chosen for chosen in selected if not any(fits(chosen, images) for images in data)]
    if selected and len(lacking) == len(selected):
        kind = lacking[0].layout
        example = f"{kind}={kind}:/data/{kind}" if kind else "cifar10=folder:/data/cifar10"
        raise ValueError(f"--data: none of the sets is for {lacking[0].name}; give one as --data {example}")
    return lacking


def left_out(data: Sequence[DataUsed], selected: Sequence[ChosenProtocol], space: Workspace) -> dict[str, list[str]]:
    """Name of each set whose images have several labels each -> protocols that do not take it. ValueError if that is
    all of them."""
    found: dict[str, list[str]] = {}
    for images in data:
        there = [chosen for chosen in selected if fits(chosen, images)]
        opened = space.opened.known(images.url, "val")
        refused = [chosen.name for chosen in there if opened is not None and not chosen.task.takes(opened)]
        if refused and len(refused) == len(there):
            why = "its images have several labels each, which none of the protocols chosen takes"
            raise ValueError(f"--data {images.name}={images.url}: {why}; add logreg@dinov2 to --suite")
        found |= {images.name: refused} if refused else {}
    return found


def refused_networks(checkpoint: LoadedCheckpoint, selected: Sequence[ChosenProtocol]) -> dict[str, list[str]]:
    """Why tasks cannot evaluate a checkpoint's network -> their protocols. ValueError if that is all of them."""
    found: dict[str, list[str]] = {}
    for chosen in selected:
        try:
            chosen.task.check_network(checkpoint.spec)
        except ValueError as error:
            found.setdefault(in_one_line(error), []).append(chosen.name)
    if selected and sum(map(len, found.values())) == len(selected):
        reason, names = next(iter(found.items()))
        raise ValueError(f"--suite: no protocol chosen can evaluate {checkpoint.used.name}; {names[0]}: {reason}")
    return found
