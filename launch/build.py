"""`roformer tokenizer`, `shards` and `verify`: from text to what a trainer reads.

What is made remembers what it was made from, in a note beside it. Made again from the same, it is
kept; from anything else, a person must take it away first.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from configs.schema import Config
from data_pipeline.corpus import read_documents, source_files
from data_pipeline.index import INDEX_NAME, load_index
from data_pipeline.index import verify as verify_shards
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from launch.errors import EXIT_FAILED, EXIT_OK
from launch.run_folder import unwritable, write_text


def build_tokenizer(config: Config, console: Console) -> int:
    """Train the tokenizer on `corpus.train`."""
    settings = config.tokenizer
    if settings.kind == "bytes":
        console.print("tokenizer: bytes need no training")
        return EXIT_OK
    _require(config.corpus.train, "corpus.train")
    model = Path(settings.model)
    _check_place(model.parent, "tokenizer.model")
    if model.is_dir():
        raise ValueError(f"tokenizer.model: {model} is a folder; name a file")
    note = Note(model.with_name(f"{model.name}.made_from.json"))
    made_from = {
        "tokenizer": settings.model_dump(include={"kind", "vocab_size"}),
        "text": _fingerprint(config.corpus.train, config.corpus.text_key),
    }
    if model.exists():
        note.check(model, made_from)
        console.print(f"tokenizer: {model} is there and up to date")
        return EXIT_OK
    with _spinner(
        console, f"tokenizer: training {settings.kind} of {settings.vocab_size:,}"
    ) as tell:
        documents = read_documents(config.corpus.train, config.corpus.text_key)
        summary = train_tokenizer(settings, documents)
        tell("done")
    note.write(made_from)
    console.print(
        f"tokenizer: {model}, {summary.vocab_size:,} pieces from {summary.documents:,} documents"
    )
    return EXIT_OK


def build_shards(config: Config, console: Console) -> int:
    """Write the shards of `corpus.train` and of `corpus.eval`."""
    tokenizer = load_tokenizer(config.tokenizer)
    _require(config.corpus.train, "corpus.train")
    if not isinstance(config.data.train, str):
        raise ValueError("data.train lists sources; name the one folder that the shards go to")
    parts = [("train", config.corpus.train, config.data.train, config.data.lanes)]
    if config.corpus.eval:
        parts.append(("eval", config.corpus.eval, config.data.eval or "", 1))
    for name, sources, target, min_shards in parts:
        if not target:
            raise ValueError(f"data.{name} must name the folder that the shards go to")
        folder = Path(target)
        folder = folder.parent if folder.suffix == ".json" else folder
        _check_place(folder, f"data.{name}")
        note = Note(folder.with_name(f"{folder.name}.made_from.json"))
        made_from = {
            "tokenizer": tokenizer.sha256,
            "text": _fingerprint(sources, config.corpus.text_key),
            "seed": config.run.seed,
            "min_shards": min_shards,
            "shard_mib": config.corpus.shard_mib,
        }
        if (folder / INDEX_NAME).exists():
            note.check(folder, made_from)
            console.print(f"shards: {folder} is there and up to date")
            continue
        with _spinner(console, f"shards: {folder}") as tell:
            index = write_shards(
                read_documents(sources, config.corpus.text_key),
                tokenizer,
                folder,
                seed=config.run.seed,
                min_shards=min_shards,
                shard_mib=config.corpus.shard_mib,
                workers=config.corpus.workers,
                progress=lambda docs, tokens: tell(f"{docs:,} documents, {tokens:,} tokens"),
            )
        note.write(made_from)
        console.print(
            f"shards: {folder}, {len(index.shards)} shards, {index.docs:,} documents, "
            f"{index.tokens:,} tokens ({index.dtype})"
        )
    return EXIT_OK


def verify(path: Path, console: Console) -> int:
    """Check a folder of shards against its index."""
    index = load_index(path)
    problems = verify_shards(path)
    for problem in problems:
        console.print(f"verify: {problem}", style="red", highlight=False, markup=False)
    if problems:
        return EXIT_FAILED
    console.print(
        f"verify: {index.folder} is whole: {len(index.shards)} shards, {index.docs:,} documents, "
        f"{index.tokens:,} tokens"
    )
    return EXIT_OK


class Note:
    """What a file or folder was made from, as JSON beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, made_from: Mapping[str, Any]) -> None:
        """Remember what was made just now."""
        write_text(self.path, json.dumps(made_from, indent=1))

    def check(self, target: Path, made_from: Mapping[str, Any]) -> None:
        """Refuse to go on where what is there was made from something else."""
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        changed = [key for key in made_from if before.get(key) != made_from[key]]
        if changed:
            raise ValueError(
                f"{target} is there already, made from another {', '.join(changed)}; remove it to "
                "make it again, or name another place"
            )


def _require(sources: list[str], key: str) -> None:
    if not sources:
        raise ValueError(f"{key} names no text; give it files, folders or patterns")


def _check_place(folder: Path, key: str) -> None:
    """Refuse a place that cannot be written to, before the work and not after it."""
    if (obstacle := unwritable(folder)) is not None:
        raise ValueError(f"{key}: {obstacle} is no folder that can be written to")


def _fingerprint(sources: list[str], text_key: str) -> str:
    """Hash the names, sizes and times of all files of a corpus."""
    digest = hashlib.sha256(text_key.encode())
    for name in source_files(sources):
        status = Path(name).stat()
        digest.update(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


@contextmanager
def _spinner(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show that something goes on, and how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as bars:
        task = bars.add_task(title)
        yield lambda text: bars.update(task, description=f"{title}: {text}")
