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

    config = load(arguments.config, arguments.overrides)
    return build_shards(config, console, arguments.part, arguments.merge)


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from launch.build import verify

    return verify(arguments.source, arguments.text_key, console)


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from launch.plan_page import plan

    return plan(arguments, console)


def _train(arguments: argparse.Namespace, console: Console) -> int:
    with signals_held():  # during the seconds of imports and checks: answered by the ranks
        from launch.spawn import train_here

        return train_here(arguments.config, arguments.overrides, console)


def _profile(arguments: argparse.Namespace, console: Console) -> int:
    from launch.profiling import profile_here

    return profile_here(
        arguments.config,
        arguments.overrides,
        console,
        steps=arguments.steps,
        stage=arguments.stage,
        trace=arguments.trace,
    )


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    with signals_held():
        from launch.compare import compare

        return compare(arguments.config, arguments.overrides, console)


def _launch(arguments: argparse.Namespace, console: Console) -> int:
    from launch.submit import launch

    return launch(arguments, console)


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    from launch.doctor import doctor

    return doctor(arguments, console)


def _dashboard(arguments: argparse.Namespace, console: Console) -> int:
    from launch.dashboard import dashboard

    return dashboard(arguments, console)


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
    "profile": (_profile, "show where a training step's time goes; save a trace"),
    "train": (_train, "pre-train, or go on with a run"),
    "compare": (_compare, "train the arms of a paired study, and report"),
    "launch": (_launch, "train on the machines of Slurm or of a hostfile"),
    "doctor": (_doctor, "say whether a run would start on its hosts"),
}


def _part(text: str) -> tuple[int, int]:
    """Parse i/n, counted from 0 or from 1 as a Slurm array is: n/n is 0/n."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 0 <= int(number) <= int(parts) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write i/n, for instance 0/8")
    return int(number) % int(parts), int(parts)


def _launch_options(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Print the script that trains on the machines of Slurm or of a hostfile; with --submit, "
        "start it. Resources and hooks are set in the config's section `launch`."
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--slurm", action="store_true", help="an sbatch script")
    where.add_argument("--hostfile", metavar="FILE", help="lines of `host slots=8`")
    command.add_argument("--include", default="", metavar="HOST[:0,2]@...", help="of the hostfile")
    command.add_argument("--exclude", default="", metavar="HOST[:0,2]@...", help="of the hostfile")
    command.add_argument(
        "--array",
        choices=["arms", "seeds"],
        help="a job array: each arm of `compare` with each of its seeds, or this run with each",
    )
    command.add_argument(
        "--shards", type=_count, metavar="N", help="a job array that writes the shards in N parts"
    )
    command.add_argument(
        "--submit", action="store_true", help="start it, and say where its logs are"
    )


def _plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=_count, metavar="N", help="plan for so many ranks")
    command.add_argument(
        "--device",
        choices=["v100", "a100-40", "a100", "h100", "h200", "b200"],
        help="plan for devices that are not at hand",
    )
    command.add_argument(
        "--rate", type=float, metavar="TFLOPS", help="time by this rate, in TFLOP/s a rank"
    )
    command.add_argument(
        "--calibrate", action="store_true", help="time by a few steps of each stage, run here"
    )


def _doctor_options(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Ask the hosts of the hostfile, of the Slurm allocation that we are in, or this one: "
        "versions, devices, memory, disk, ports, network, an all-reduce. Exit code 2 if the run "
        "would fail."
    )
    command.add_argument("--hostfile", metavar="FILE", help="lines of `host slots=8`")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def _profile_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--steps", type=int, default=5, help="steps that are profiled (5)")
    command.add_argument("--stage", help="name of a stage; the first by default")
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="by default RUN.DIR/NAME.trace.json.gz"
    )


def _shards_options(command: argparse.ArgumentParser) -> None:
    share = command.add_mutually_exclusive_group()
    share.add_argument("--part", type=_part, metavar="i/n", help="do one of n shares, anywhere")
    share.add_argument("--merge", action="store_true", help="after the parts: the rest, the index")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "shards": _shards_options,
    "profile": _profile_options,
    "launch": _launch_options,
    "plan": _plan_options,
    "doctor": _doctor_options,
}
"""What a command takes besides a config and overrides."""


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
        if name in OPTIONS:
            OPTIONS[name](command)
    command = commands.add_parser(
        "verify",
        help="check shards against their index, or others' tars by their structure",
        description="Check every byte of shards against their index.json (a path or a URL, its own "
        "or its folder's); or, without an index, the structure of tars and samples (names, "
        "patterns, URLs). Exit 1 where there is damage, 2 where there is nothing to read.",
    )
    command.add_argument("source", metavar="INDEX_OR_SHARDS")
    command.add_argument("--text-key", default="text", help="key of the text in json and jsonl")
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
    command = commands.add_parser(
        "dashboard",
        help="open MLflow's pages on the curves of runs",
        description="Start MLflow's server on the store of runs or of a study, and print the "
        "address of the chart that compares them; Ctrl-C ends it.",
    )
    command.add_argument(
        "folders", type=Path, nargs="+", metavar="RUN", help="a study's folder, or those of runs"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    command.add_argument("--port", type=int, default=5000, help="its port (5000)")
    command.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers on other machines may call this one",
    )
    command.set_defaults(run=_dashboard)
    command = commands.add_parser("export", help="write a run's weights as a Hugging Face folder")
    command.add_argument("run_folder", type=Path, metavar="RUN")
    command.add_argument("folder", type=Path, metavar="FOLDER")
    command.set_defaults(run=_export)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes overrides in one place only; behind an option they are left over
    if not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest):
        parser.parse_args(argv)  # says what is wrong
    elif rest:
        arguments.overrides += rest
    console = Console(highlight=False, soft_wrap=True)
    return exit_code(lambda: arguments.run(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
