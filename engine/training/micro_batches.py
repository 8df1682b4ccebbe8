"""A recipe's batch is split equally over the processes, and each share into micro-batches that fit the device."""


def share_of(batch: int, processes: int) -> int:
    """Images of a batch that each process works on. ValueError where they cannot be shared equally."""
    if batch % processes:
        near = batch // processes * processes or processes
        raise ValueError(f"batch={batch} cannot be shared by {processes} processes; set batch={near}")
    return batch // processes


def micro_batch_size(share: int, largest: int, even: bool = False) -> int:
    """The largest divisor of `share` up to `largest`, an even one where asked; 0 where there is none."""
    sizes = [size for size in range(1, min(share, largest) + 1) if share % size == 0 and not (even and size % 2)]
    return max(sizes, default=0)
