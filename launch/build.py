"""`roformer tokenizer`, `shards` and `verify`: from text to what a trainer reads.

What is made remembers what it was made from, in a note beside it. Made again from the same, it is
kept; from anything else, a person must take it away first.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.schema import Config
from data_pipeline.corpus import keep_in, read_documents, source_files, stop
from data_pipeline.foreign import is_foreign, open_foreign, verify_foreign
from data_pipeline.index import INDEX_NAME, load_index
from data_pipeline.index import verify as verify_shards
from data_pipeline.reading import Reading
from data_pipeline.shards import Building, Layout, plan_building
from data_pipeline.sources import redacted, stat
from data_pipeline.tokenizers import BytesTokenizer, load_tokenizer, train_tokenizer
from data_pipeline.tokenizing import Encoder, EncoderPool
from launch.errors import EXIT_FAILED, EXIT_OK, Failed
from launch.meter import metered, print_census, spinner
from launch.run_folder import unwritable, write_text


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
        "tokenizer": {
            **settings.model_dump(include={"kind", "vocab_size"}),
            **settings.model_dump(include={"normalizer", "sample_mchars"}, exclude_defaults=True),
        },
        "text": _fingerprint(config.corpus.train, config.corpus.text_key),
    }
    if model.exists():
        if note.path.exists():
            note.check(model, made_from)
        load_tokenizer(settings)  # whole, and what the config says
        state = "up to date" if note.path.exists() else "kept: it was not trained here"
        console.print(f"tokenizer: {model} is there and {state}")
        return EXIT_OK
    if settings.vocab_size is None:
        raise ValueError("tokenizer.vocab_size is null; say how many pieces to train")
    errors: list[str] = []
    on_error = keep_in(errors) if config.corpus.on_error == "skip" else stop
    with spinner(console, f"tokenizer: training {settings.kind} of {settings.vocab_size:,}"):
        documents = read_documents(config.corpus.train, config.corpus.text_key, on_error)
        summary = train_tokenizer(settings, documents)
    note.write(made_from)
    share = summary.sampled / max(1, summary.characters)
    console.print(
        f"tokenizer: {model}, {summary.vocab_size:,} pieces from {summary.documents:,} documents"
        + (f", a sample of {share:.1%} of their characters" if share < 0.9 else "")
        + (f"; {len(errors):,} unreadable left out, the first {errors[0]}" if errors else "")
    )
    return EXIT_OK


def build_shards(
    config: Config, console: Console, part: tuple[int, int] | None = None, merge: bool = False
) -> int:
    """Write the shards of `corpus.train` and of `corpus.eval`.

    With `part` (i, n) only the i-th of n shares of the work is done: of tokenizing, and of writing
    once all that is tokenized. `merge` writes what the parts left, and publishes.
    """
    encoder = Encoder(
        load_tokenizer(config.tokenizer),
        config.corpus.text_key,
        skips_errors=config.corpus.on_error == "skip",
    )
    _require(config.corpus.train, "corpus.train")
    if not isinstance(config.data.train, str):
        raise ValueError("data.train lists sources; name the one folder that the shards go to")
    sets = [("train", config.corpus.train, config.data.train, config.data.lanes)]
    if config.corpus.eval:
        sets.append(("eval", config.corpus.eval, config.data.eval or "", 1))
    # A pool costs next to nothing until it is given work.
    with EncoderPool(encoder, config.corpus.workers) as pool:
        for name, sources, target, min_shards in sets:
            if not target:
                raise ValueError(f"data.{name} must name the folder that the shards go to")
            folder = Path(target)
            folder = folder.parent if folder.suffix == ".json" else folder
            _check_place(folder, f"data.{name}")
            layout = Layout(config.run.seed, min_shards, config.corpus.shard_mib)
            building = plan_building(folder, source_files(sources), encoder, layout)
            note = Note(folder.with_name(f"{folder.name}.made_from.json"))
            made_from = {
                "tokenizer": encoder.tokenizer.sha256,
                "text": _fingerprint(sources, config.corpus.text_key),
                "seed": config.run.seed,
                "min_shards": min_shards,
                "shard_mib": config.corpus.shard_mib,
                **config.corpus.model_dump(include={"on_error"}, exclude_defaults=True),
            }
            if (folder / INDEX_NAME).exists():
                note.check(folder, made_from)
                building.place.clear()  # where only this was left to do
                console.print(f"shards: {folder} is there and up to date")
                continue
            with building.locked(shared=part is not None):
                try:
                    _build(building, pool, config.corpus.workers, part, merge, console)
                except BrokenProcessPool:
                    raise Failed(
                        f"shards: {folder}: one of the processes was killed (out of memory?); the "
                        "same command goes on, with fewer of them by corpus.workers"
                    ) from None
                if part is None:
                    _publish(building, note, made_from, console)
    return EXIT_OK


def _build(
    building: Building,
    pool: EncoderPool,
    workers: int,
    part: tuple[int, int] | None,
    merge: bool,
    console: Console,
) -> None:
    """Do a part of a building, or all of it."""
    folder = building.folder
    number, parts = part or (0, 1)
    with metered(console, f"shards: {folder}") as progress:
        if not merge:
            building.tokenize(pool, number, parts, progress)
        missing = len(building.missing_units)
        if merge and missing:
            raise ValueError(
                f"{missing} of the {building.num_units} units of {folder} are not tokenized yet: "
                "run each `--part i/n`, then --merge"
            )
        if not missing:
            building.write(number, parts, workers=workers, progress=progress)
    if part is None:
        return
    written = building.num_buckets - len(building.missing_buckets)
    console.print(
        f"shards: {folder}, {building.num_units - missing} of {building.num_units} units "
        f"tokenized, {written} of {building.num_buckets} buckets written"
    )
    if not missing:
        console.print(
            "shards: every part is tokenized; the parts again write the shards together, --merge "
            "writes what is left and the index"
        )


def _publish(
    building: Building, note: Note, made_from: Mapping[str, Any], console: Console
) -> None:
    """Let the folder appear, and report what is in it."""
    census, errors = building.census(), building.errors()
    # Before the shards, or a kill between the two would leave some of unknown origin.
    note.write(made_from)
    index = building.publish()
    console.print(
        f"shards: {building.folder}, {len(index.shards)} shards, {index.docs:,} documents, "
        f"{index.tokens:,} tokens ({index.dtype})"
    )
    print_census(console, census, errors)


def verify(source: str, text_key: str, console: Console) -> int:
    """Check shards against their index, or the structure of those that have none."""
    if is_foreign(source):
        shards = open_foreign(source, BytesTokenizer(), text_key, Reading())
        documents, problems = verify_foreign(shards)
        whole = f"{len(shards.urls)} shards without an index, {documents:,} documents"
    else:
        index = load_index(source)
        problems = verify_shards(source)
        whole = f"{len(index.shards)} shards, {index.docs:,} documents, {index.tokens:,} tokens"
    for problem in problems:
        console.print(f"verify: {problem}", style="red", highlight=False, markup=False)
    if problems:
        return EXIT_FAILED
    console.print(f"verify: {redacted(source)} is whole: {whole}", markup=False)
    return EXIT_OK


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
        known = stat(name)
        digest.update(f"\0{redacted(name)}\0{known.size}\0{known.version}".encode())
    return digest.hexdigest()
