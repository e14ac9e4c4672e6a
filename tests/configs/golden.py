"""The resolved form of every YAML in configs/, as text; `make golden` writes it anew."""

from pathlib import Path

from configs.loader import load, to_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parents[1] / "golden" / "configs"

NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


def resolved(name: str) -> str:
    """Return a config's resolved form."""
    return to_yaml(load(CONFIGS / name))


if __name__ == "__main__":
    for name in NAMES:
        file = GOLDEN / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(resolved(name), encoding="utf-8")
