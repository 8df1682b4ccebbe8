"""How linear heads are trained on the patches of a frozen network: the base of such tasks, and the training loop.

Heads are trained on random crops. In each step all processes see the same batch: each sends its share of the crops
through the network, in chunks whose size does not depend on the number of processes, and the features are exchanged. A
training therefore has the same bits on any number of processes, and batch norms cover the whole batch.

B images, D' channels of a feature map, h x w patches.
"""

import copy
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.reading import loader_processes
from downstream.data.scenes import SceneSet
from downstream.frozen.task import (
    Batches,
    FrozenTask,
    Random,
    UsableScenes,
    backbone_of,
    map_across_processes,
)
from engine.files import locked
from engine.progress import Progress
from engine.seeding import AUGMENT, DROP, shuffled, stream_seeds
from engine.settings import check_up_to
from engine.tasks import Emit, Head, Workspace, settings_of
from engine.training.interruptions import Stopped, StopRequest, listening
from engine.training.loading import read_ahead
from engine.training.schedules import FallingOneCycle, TrainProgress, check_finite, micro_batch_size
from engine.training.states import (
    State,
    load_optimizer,
    load_state,
    newest_intact,
    optimizer_tensors,
    save_interval,
    save_state,
)
from engine.work import Part, Scale, Work
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, training_folder

VERSION = 1  # of training states; raise it if the same settings would train differently
CHUNK = 2  # crops in a forward pass, unless --batch-size is given
LOSS = 500.0  # operations that the loss of a pixel and class, its upsampling and gradient are counted as


class HeadSnapshot(NamedTuple):
    """Weights of one head after some steps."""

    lr: float
    step: int
    state: Mapping[str, Tensor]  # state_dict of the head, on the CPU


class HeadTask(FrozenTask):
    """Base of tasks that train linear heads. Annotations without values are settings that all subclasses define."""

    EVALUATION_ONLY: ClassVar[tuple[str, ...]] = ()  # settings that do not change the training

    lr: tuple[float, ...]
    steps: int
    warmup: int
    batch: int
    weight_decay: float
    beta2: float
    clip: float
    kept: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_up_to(self, "warmup", "steps")
        check_up_to(self, "kept", "steps")

    def schedule(self) -> FallingOneCycle:
        """The schedule of the learning rates."""
        raise NotImplementedError

    def input_size(self, spec: FrozenSpec) -> tuple[int, int]:
        """Height and width in pixels of the images that the network sees in training."""
        raise NotImplementedError

    def read_crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        """A random crop of a training image: normalised image (3, H, W), and its labels or depths (H', W')."""
        raise NotImplementedError

    def build_head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        """A head with random weights, drawn from torch's generator."""
        raise NotImplementedError

    def head_inputs(self, backbone: Backbone, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) -> the features (B, D', h, w) that heads read."""
        raise NotImplementedError

    def loss(self, head: nn.Module, features: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        """Loss of one head on a batch: features (B, D', h, w), targets (B, H', W')."""
        raise NotImplementedError

    def evaluate_scene(self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int) -> Any:
        """The result of every head on one scene, which goes through the network once."""
        raise NotImplementedError

    def predict_image(self, backbone: Backbone, head: nn.Module, image: Image.Image) -> np.ndarray:
        """What a head predicts for an RGB image, of its height and width (H, W): see `Predicts`."""
        raise NotImplementedError

    def load_head(self, spec: FrozenSpec, classes: int, state: Mapping[str, Tensor], device: str) -> nn.Module:
        """A trained head for evaluation. state: its state_dict."""
        head = self.build_head(spec, classes).to(device).eval()
        head.load_state_dict(dict(state))
        return head

    def apply_head(
        self, head: Head, export: FrozenExport, images: ImageSet, space: Workspace, emit: Emit, first: int = 0
    ) -> None:
        module = self.load_head(export.spec, len(head.classes), head.tensors, space.device)
        backbone = backbone_of(export, space)
        for index in range(first, len(images)):
            try:
                image = images.image(index)
            except UnreadableImage as error:
                if not space.skip_bad:
                    raise
                emit(index, error.reason)
            else:
                emit(index, self.predict_image(backbone, module, image))

    def evaluate(
        self, backbone: Backbone, snapshots: Sequence[HeadSnapshot], images: UsableScenes, space: Workspace
    ) -> dict[int, Any]:
        """Index of every usable scene -> result of `evaluate_scene`, in every process."""
        scenes, classes = images.scenes, len(images.scenes.classes)
        heads = [self.load_head(backbone.spec, classes, snapshot.state, space.device) for snapshot in snapshots]
        work = partial(self.evaluate_scene, backbone, heads, scenes)
        return map_across_processes(images.indices, work, space, f"evaluating on {scenes.url} {scenes.split}")

    def train_heads(
        self, export: FrozenExport, train: UsableScenes, val: UsableScenes, space: Workspace
    ) -> list[HeadSnapshot]:
        """Train one head per learning rate on the same crops.

        A finished training is read from disk. A killed one continues from its last state, with the same bits.

        Returns:
            Snapshots of all heads, taken `kept` times at even intervals.

        Raises:
            ValueError: a validation scene cannot be used; this is checked before a training that may take hours.
        """
        chunk = micro_batch_size(self.batch, space.batch_size or CHUNK)
        settings = {name: value for name, value in settings_of(self).items() if name not in self.EVALUATION_ONLY}
        key = {"version": VERSION, "settings": settings, "piece": chunk, "seed": space.seed, **train.key(export, space)}
        world = space.world
        folder = world.on_rank0(lambda: training_folder(space.cache / self.KEY, key, [train.scenes]))
        with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"training heads on {train.scenes.url}")):
            training = HeadTraining(self, export, train, space, folder, chunk)
            if training.step < self.steps and not space.skip_bad:
                for problem in world.on_rank0(lambda: val.scenes.unusable).values():
                    raise ValueError(problem)
            training.run()
        return training.snapshots

    def evaluation_parts(self, scale: Scale) -> list[Part]:
        """The work of choosing among the heads and of evaluating the chosen one."""
        raise NotImplementedError

    def cost(self, scale: Scale) -> Work:
        """Memory: the network's forward pass, and features of a batch with what the heads' gradients need."""
        self.check_network(scale.spec)
        spec, size, heads = scale.spec, self.input_size(scale.spec), len(self.lr)
        with torch.device("meta"):
            weights = sum(value.numel() for value in self.build_head(spec, scale.classes).parameters())
        patches, pixels = math.prod(spec.grid_of(size)), math.prod(size) * max(scale.classes, 1)
        parts = (
            Part(kind="crops", count=self.steps * self.batch, flops=float(forward_flops(spec, max(size)))),
            Part(kind="heads", count=self.steps * heads, flops=self.batch * (6.0 * weights * patches + LOSS * pixels)),
            *self.evaluation_parts(scale),
        )
        features = 12.0 * self.batch * spec.width * patches
        network = frozen_bytes(spec, scale.batch_size or CHUNK, max(size))
        return Work(parts=parts, iterations=self.steps, memory=network + features)


class HeadTraining:
    """One training of several heads, one per learning rate. It continues from the newest state in `folder`.

    chunk: crops in a forward pass, a divisor of the batch.
    """

    def __init__(
        self, task: HeadTask, export: FrozenExport, train: UsableScenes, space: Workspace, folder: Path, chunk: int
    ) -> None:
        self.task, self.export, self.train, self.space, self.folder = task, export, train, space, folder
        self.chunk = chunk
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(space.seed)
            initial = task.build_head(export.spec, len(train.scenes.classes))
        self.heads = [copy.deepcopy(initial).to(space.device).train() for _ in task.lr]
        self.optimisers = [
            torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, task.beta2), weight_decay=task.weight_decay)
            for head, lr in zip(self.heads, task.lr, strict=True)
        ]
        self.step = 0
        self.snapshots: list[HeadSnapshot] = []
        self.losses: list[float] = []  # the last five, for the message of a loss that is not finite
        state = space.world.on_rank0(lambda: load_state(newest) if (newest := newest_intact(folder)) else None)
        if state is not None:
            self.load(state)

    def run(self) -> None:
        """Train to the last step. After a signal the state is saved, and Stopped is raised."""
        task, world = self.task, self.space.world
        if self.step == task.steps:
            return
        request, interval = StopRequest(), save_interval(task.steps)
        label = f"{task.KEY} on {self.train.scenes.url.removesuffix(':')}"
        backbone = backbone_of(self.export, self.space)
        progress = Progress(f"training {label}", task.steps, "steps")
        with listening(request.ask), progress:
            progress.resume(self.step)
            batches = self.batches(backbone)
            for features, targets in batches:
                self.update(features, targets)
                progress.advance(1)
                stop = any(world.gather_results(lambda: request.asked))
                if self.step % interval == 0 or self.step == task.steps or stop:
                    world.on_rank0(lambda: save_state(self.folder, self.step, self.state()))
                if stop and self.step < task.steps:
                    batches.close()
                    raise Stopped.after(self.step, task.steps, label, self.folder)

    def batches(self, backbone: Backbone) -> Generator[tuple[Tensor, Tensor]]:
        """Features (B, D', h, w) and targets (B, H', W') of each remaining step, the same in all processes."""
        task, space = self.task, self.space
        own_chunks = range(space.world.rank, task.batch // self.chunk, space.world.size)  # of this process, in a batch
        starts = [
            step * task.batch + chunk * self.chunk for step in range(self.step, task.steps) for chunk in own_chunks
        ]
        read = partial(read_numbered_crop, task, self.export, self.train, space.seed)
        reader = Batches(read, [range(start, start + self.chunk) for start in starts])

        def own_features(loaded: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            """Features and targets of this process's chunks of one step."""
            return [
                (task.head_inputs(backbone, images.to(space.device, non_blocking=True)), targets.to(space.device))
                for images, targets in islice(loaded, len(own_chunks))
            ]

        loaders = loader_processes(space, len(self.train.indices))
        with closing(read_ahead(reader, loaders, space.device)) as loaded:
            for _ in range(self.step, task.steps):
                yield self.exchange(space.world.on_all_ranks(partial(own_features, loaded)), own_chunks)

    def exchange(self, chunks: Sequence[tuple[Tensor, Tensor]], numbers: range) -> tuple[Tensor, Tensor]:
        """The whole batch, in every process, from the `chunks` of this process and their `numbers` in the batch.

        Each process writes its chunks into zeros, and the batch is the sum over processes.
        """
        world = self.space.world
        if world.size == 1:
            return torch.cat([features for features, _ in chunks]), torch.cat([targets for _, targets in chunks])
        described = [(features.shape[1:], targets.shape[1:], targets.dtype) for features, targets in chunks[:1]]
        # A process without a chunk learns shapes and type from the others.
        feature_shape, target_shape, dtype = next(shapes[0] for shapes in world.gather_objects(described) if shapes)
        features = torch.zeros(self.task.batch, *feature_shape, device=self.space.device)
        targets = torch.zeros(self.task.batch, *target_shape, dtype=dtype, device=self.space.device)
        for number, (own_features, own_targets) in zip(numbers, chunks, strict=True):
            rows = slice(number * self.chunk, (number + 1) * self.chunk)
            features[rows], targets[rows] = own_features, own_targets
        world.all_reduce(features)
        world.all_reduce(targets)
        return features, targets

    def update(self, features: Tensor, targets: Tensor) -> None:
        """One step of every head. ValueError at the first loss or gradient that is not finite."""
        task, schedule = self.task, self.task.schedule()
        progress = TrainProgress(step=self.step, steps_per_epoch=task.steps, epochs=1)
        for head, optimiser, lr in zip(self.heads, self.optimisers, task.lr, strict=True):
            group = optimiser.param_groups[0]
            group["lr"] = schedule.at(lr, progress)
            if schedule.momenta is not None:
                group["betas"] = (schedule.beta1_at(progress), task.beta2)
            random = np.random.RandomState(stream_seeds(DROP, self.space.seed, self.step))
            loss = task.loss(head, features, targets, self.step, random)
            where = f"step {self.step} of {task.steps} (rate {lr:g})"
            check_finite(loss.item(), "loss", where, self.losses, "set a lower lr")
            self.losses = [*self.losses[-4:], loss.item()]
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(head.parameters(), task.clip or math.inf)
            check_finite(norm.item(), "gradient norm", where, self.losses, "set a lower lr")
            optimiser.step()
        self.step += 1
        if self.step in [task.steps * number // task.kept for number in range(1, task.kept + 1)]:
            for head, lr in zip(self.heads, task.lr, strict=True):
                weights = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
                self.snapshots.append(HeadSnapshot(lr, self.step, weights))

    def state(self) -> State:
        """Heads, optimisers and snapshots, to be saved."""
        tensors: dict[str, Tensor] = {}
        for number, (head, optimiser) in enumerate(zip(self.heads, self.optimisers, strict=True)):
            tensors |= {f"head{number}.{name}": tensor for name, tensor in head.state_dict().items()}
            tensors |= {f"rate{number}.{name}": tensor for name, tensor in optimizer_tensors(optimiser).items()}
        for number, snapshot in enumerate(self.snapshots):
            tensors |= {f"kept{number}.{name}": tensor for name, tensor in snapshot.state.items()}
        kept = [[snapshot.lr, snapshot.step] for snapshot in self.snapshots]
        return State(tensors=tensors, facts={"step": self.step, "kept": kept, "losses": self.losses})

    def load(self, state: State) -> None:
        """Continue from a saved state."""
        for number, (head, optimiser) in enumerate(zip(self.heads, self.optimisers, strict=True)):
            head.load_state_dict(state.under(f"head{number}."))
            load_optimizer(optimiser, State(tensors=state.under(f"rate{number}.")))
        self.step, self.losses = state.facts["step"], list(state.facts["losses"])
        self.snapshots = [
            HeadSnapshot(lr, step, state.under(f"kept{number}."))
            for number, (lr, step) in enumerate(state.facts["kept"])
        ]


def read_numbered_crop(
    task: HeadTask, export: FrozenExport, train: UsableScenes, seed: int, number: int
) -> tuple[Tensor, Tensor]:
    """Crop `number` of a training, which reads its images in a new random order in each epoch."""
    count = len(train.indices)
    epoch, position = divmod(number, count)
    index = int(train.indices[shuffled(count, seed, epoch)[position]])
    random = np.random.RandomState(stream_seeds(AUGMENT, seed, epoch, index))
    return task.read_crop(export, train.scenes, index, random)
