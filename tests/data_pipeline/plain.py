"""Shards as any program reads them that knows WebDataset and nothing of this one."""

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import webdataset


def read_plainly(paths: Iterable[Path]) -> dict[str, np.ndarray]:
    """Return {key: ids}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves files open
        urls = [str(path) for path in paths]
        dataset = webdataset.WebDataset(urls, shardshuffle=False).decode()
        samples = {sample["__key__"]: sample["npy"] for sample in dataset}
        del dataset
        gc.collect()
    return samples
