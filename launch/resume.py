"""What a run goes on from, chosen by its first rank, and whether that fits the run."""

import hashlib
import logging
from pathlib import Path

from configs.loader import ConfigError
from configs.schema import Config
from launch.preflight import Prepared
from launch.run_folder import CHECKPOINTS, folder_of
from model.heads import LanguageModel
from trainer import checkpoint
from trainer.distributed import from_first

log = logging.getLogger(__name__)


def find_checkpoint(config: Config) -> checkpoint.Checkpoint | None:
    """Load what the run goes on from; the first rank alone reads every byte to choose it.

    Raises:
        ConfigError: On all ranks, where there are checkpoints and none will do.
    """
    root = folder_of(config) / CHECKPOINTS

    def choose() -> tuple[Path | None, str | None]:
        try:
            found = checkpoint.find(root, config.checkpoint.resume)
            if found is not None and found.absolute().parent == root.absolute():
                for folder in checkpoint.set_aside_after(root, checkpoint.step_of(found)):
                    log.warning("set aside: %s is of a later step than %s", folder, found.name)
        except (ValueError, OSError) as error:
            return None, str(error)
        return found, None

    found, problem = from_first(choose)
    if problem is not None:
        raise ConfigError([problem])
    return checkpoint.load(found) if found else None


def order_of(prepared: Prepared) -> str:
    """Fingerprint what fixes the order of samples; cursors mean nothing in another order."""
    config = prepared.config
    facts = (prepared.train.sha256, config.run.seed, config.data.lanes)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def load_weights(model: LanguageModel, saved: checkpoint.Checkpoint) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        ConfigError: Where it is another model's.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.weights.items()}
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ConfigError(
                [
                    f"{saved.folder} is of another model: {name} is {theirs.get(name)} there, and "
                    f"{own.get(name)} here"
                ]
            )
    model.load_state_dict(saved.weights)
