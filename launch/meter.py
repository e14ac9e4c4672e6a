"""What a long command shows while it works, and what it counted at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data_pipeline.census import Census
from data_pipeline.shards import Progress as Tell

SECONDS_BETWEEN_LINES = 30.0
"""Where no terminal shows the spinner: a log gets a line that often."""
BAR = 40
"""Width of the histogram's longest bar."""


@contextmanager
def spinner(console: Console, title: str) -> Iterator[None]:
    """Show that something goes on."""
    with _bars(console) as bars:
        bars.add_task(title)
        yield


@contextmanager
def metered(console: Console, title: str) -> Iterator[Tell]:
    """Show how far a work is, and how fast it goes."""
    started = told = time.monotonic()
    with _bars(console) as bars:
        task = bars.add_task(title)

        def tell(what: str, census: Census) -> None:
            nonlocal told
            now = time.monotonic()
            rate = census.tokens / max(now - started, 1e-3)
            text = (
                f"{title}: {what}, {census.documents:,} documents, {census.tokens:,} tokens, "
                f"{rate:,.0f} tokens/s"
            )
            bars.update(task, description=text)
            if not console.is_terminal and now - told > SECONDS_BETWEEN_LINES:
                console.print(text)
                told = now

        yield tell


def _bars(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_census(console: Console, census: Census, errors: list[str]) -> None:
    """Print what a corpus holds: sizes, lengths, and what was left out."""
    console.print(
        f"  {census.bytes / 1e6:,.1f} MB of text, {census.bytes_per_token:.2f} bytes a token, "
        f"{census.unknown_rate:.3%} of tokens outside the vocabulary"
    )
    if census.blank or census.skipped:
        console.print(f"  left out: {census.blank:,} blank, {census.skipped:,} unreadable")
    for error in errors:
        console.print(f"  unreadable: {error}", style="yellow", markup=False)
    most = max(census.lengths)
    for power, count in enumerate(census.lengths):
        if count:
            bar = "▇" * max(1, BAR * count // most)
            console.print(
                f"  {1 << power >> 1:>9,} to {(1 << power) - 1:>9,} tokens  {bar} {count:,}"
            )
