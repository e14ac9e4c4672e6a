"""The command line: `roformer COMMAND CONFIG.yaml [key=value ...]`.

Exit codes: 0 done, 2 bad input or config, 1 failed, 75 preempted after saving.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from launch.errors import exit_code
from trainer.preemption import signals_held

# Commands import what they need when they run: torch and deepspeed take seconds.


def _tokenizer(arguments: argparse.Namespace, console: Console) -> int:
    from configs.loader import load
    from launch.build import build_tokenizer

    return build_tokenizer(load(arguments.config, arguments.overrides), console)


def _shards(arguments: argparse.Namespace, console: Console) -> int:
    from configs.loader import load
    from launch.build import build_shards

    return build_shards(load(arguments.config, arguments.overrides), console)


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from launch.build import verify

    return verify(arguments.path, console)


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from configs.loader import load
    from launch.plan import print_plan

    return print_plan(load(arguments.config, arguments.overrides), console)


def _train(arguments: argparse.Namespace, console: Console) -> int:
    with signals_held():  # during the seconds of imports and checks: answered by the ranks
        from launch.spawn import train_here

        return train_here(arguments.config, arguments.overrides, console)


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    with signals_held():
        from launch.compare import compare

        return compare(arguments.config, arguments.overrides, console)


def _report(arguments: argparse.Namespace, console: Console) -> int:
    from launch.compare import report

    return report(arguments.folders, console)


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from launch.export import export

    return export(arguments.run_folder, arguments.folder, console)


CONFIGURED: dict[str, tuple[Callable[[argparse.Namespace, Console], int], str]] = {
    "tokenizer": (_tokenizer, "train the tokenizer on corpus.train"),
    "shards": (_shards, "write corpus.train and corpus.eval as shards"),
    "plan": (_plan, "check a config; print batches, memory, FLOPs and time by stage"),
    "train": (_train, "pre-train, or go on with a run"),
    "compare": (_compare, "train the arms of a paired study, and report"),
}


def build_parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    parser = argparse.ArgumentParser(
        prog="roformer",
        description="Pre-train RoFormer, and measure what rotary positions buy.",
        epilog="Exit codes: 0 done, 2 bad input or config, 1 failed, 75 preempted after saving.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, summary) in CONFIGURED.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="lies over the file; list items by index: curriculum.stages.0.steps=10",
        )
        command.set_defaults(run=run)
    command = commands.add_parser(
        "verify",
        help="check a folder of shards against its index",
        description="Check every byte of a folder of shards against its index.json; exit 1 where "
        "shards are damaged, 2 where there is no index to read.",
    )
    command.add_argument("path", type=Path, metavar="INDEX_OR_DIR")
    command.set_defaults(run=_verify)
    command = commands.add_parser(
        "report",
        help="write report.html and report.md of finished runs",
        description="Write report.html and report.md of a study, of one run, or of several as arms "
        "(into A-vs-B beside the first); deliver what MLflow lacks of them.",
    )
    command.add_argument(
        "folders", type=Path, nargs="+", metavar="RUN", help="a study's folder, or those of runs"
    )
    command.set_defaults(run=_report)
    command = commands.add_parser("export", help="write a run's weights as a Hugging Face folder")
    command.add_argument("run_folder", type=Path, metavar="RUN")
    command.add_argument("folder", type=Path, metavar="FOLDER")
    command.set_defaults(run=_export)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = build_parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    return exit_code(lambda: arguments.run(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
