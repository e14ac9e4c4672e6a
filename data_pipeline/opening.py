"""From what the configuration names to shards that can be read."""

import os
import tempfile
from pathlib import Path

from data_pipeline.cache import GIB, Cache
from data_pipeline.config import DataConfig
from data_pipeline.foreign import is_foreign, open_foreign
from data_pipeline.index import load_index
from data_pipeline.reading import Reading, Shards
from data_pipeline.sources import Patience
from data_pipeline.tokenizers import Tokenizer

CONNECT_S = 10.0


def open_reading(config: DataConfig) -> Reading:
    """Return the settings by which all shards of a run are read."""
    patience = Patience(
        connect_s=min(CONNECT_S, config.timeout_s),
        read_s=config.timeout_s,
        retries=config.retries,
    )
    own = f"roformer-cache-{os.getuid()}"
    folder = Path(config.cache_dir or os.path.join(tempfile.gettempdir(), own))
    return Reading(config.on_error, patience, Cache(folder, int(config.cache_gib * GIB), patience))


def open_shards(source: str, tokenizer: Tokenizer, text_key: str, reading: Reading) -> Shards:
    """Find the shards that `source` names: those of an index, or tars without one.

    Raises:
        ValueError: If there are none, or they cannot be read.
    """
    if is_foreign(source):
        return open_foreign(source, tokenizer, text_key, reading)
    return load_index(source, reading.patience).model_copy(update={"reading": reading})
