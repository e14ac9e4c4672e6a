"""What arrives where ranks start: a stand-in for their python that writes down its environment."""

from pathlib import Path

import yaml

from tests.launch.test_scripts import STRANGE


def add_environment(config: Path) -> None:
    """Give a config strange values for its ranks' environment."""
    settings = yaml.safe_load(config.read_text())
    values = {name: value.replace("${", "\\${") for name, value in STRANGE.items()}
    config.write_text(yaml.safe_dump(settings | {"launch": {"environment": values}}))


def make_witness(folder: Path) -> Path:
    """Write the program; it does nothing else."""
    path = folder / "witness"
    path.write_text(f"#!/bin/sh\nexec env -0 >{folder}/$(hostname).seen\n")
    path.chmod(0o755)
    return path


def assert_came(folder: Path, *hosts: str) -> None:
    """Check what the program has seen on each host."""
    for host in hosts:
        seen = (folder / f"{host}.seen").read_bytes().decode().split("\0")
        expected = {f"{name}={value}" for name, value in STRANGE.items()}
        assert expected <= set(seen), (host, sorted(expected - set(seen)))
