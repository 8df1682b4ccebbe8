"""The order of cached features in an epoch: shuffled, but read from their file window by window.

A file larger than memory cannot be read row by row in random order: each row would cost a read of the disk. Here an
epoch goes through windows of about WINDOW rows, and within one its rows are shuffled. Images lie class by class in most
sets, so a window is no piece of the file: the file is cut into sections of as many runs of RUN rows as there are
windows, and each window takes one run of every section, which one being drawn anew in every epoch. So all windows have
the classes in nearly the same shares, a window is one sweep through the file, and the next one is read while the heads
train on this one. A set of up to WINDOW images is one window, shuffled as a whole.

The order depends on seed, epoch and the number of rows alone, whatever memory there is.
"""

import numpy as np

from probes.features.rows import row_slices

WINDOW = 65536  # rows: 201 MB for D = 768
RUN = 16  # rows that lie together: 24 KB for D = 384. Of a class of 1300 images a window of 20 has 4 to 5 runs


def window_size(rows: int) -> int:
    """Rows of a window where there are so many in all."""
    return -(-rows // -(-rows // WINDOW))


def reading_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Places 0..rows-1 in the order of an epoch."""
    # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
    random = np.random.RandomState([seed, epoch])
    if rows <= WINDOW:
        return random.permutation(rows)
    windows, runs = -(-rows // WINDOW), -(-rows // RUN)
    sections = np.arange(-(-runs // windows))
    # Row s: the runs of section s, the w-th of which goes to window w; then row w: those of window w in random order,
    # as those with a run less end a little earlier.
    drawn = sections[:, None] * windows + random.random_sample((len(sections), windows)).argsort(axis=1, kind="stable")
    mixed = random.random_sample((windows, len(sections))).argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(drawn.T, mixed, axis=1).ravel()
    places = (ordered[ordered < runs, None] * RUN + np.arange(RUN)).ravel()
    places = places[places < rows]
    for window in row_slices(rows, window_size(rows)):
        places[window] = random.permutation(places[window])
    return places
