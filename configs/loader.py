"""Loads a config: defaults, then the file and its parents, then `key=value`; strict and typed.

Every scalar stays text until the type of its field is known, so `1e-5` is a number where a number
belongs, and `24:00:00` or `695e0514` stay strings where a string belongs, whatever YAML thinks of
them. OmegaConf resolves the interpolations.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from configs.schema import Config
from configs.validation import Keys, defaults_of, dotted, section_of, unknown_key, validate


class ConfigError(ValueError):
    """Everything that is wrong with a config, one line a problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file with its parents and overrides.

    Args:
        path: The YAML file.
        overrides: `key=value` texts; list items by index (`curriculum.stages.0.steps=10`).

    Raises:
        ConfigError: With every problem found, each line naming its key.
    """
    problems: list[str] = []
    try:
        tree = OmegaConf.create(_merge(defaults_of(Config), _read(Path(path))))
    except OmegaConfBaseException as error:
        raise ConfigError([f"{path}: {_first_line(error)}"]) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"{path}: an alias (*) stands within its own anchor (&)"]) from None
    for override in overrides:
        problems += _apply(tree, override)
    data, unresolved = _resolve(tree, ())
    problems += unresolved
    sections, invalid = validate(data)
    problems += invalid
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in dict.fromkeys(problems)])
    return Config(**sections)


def to_yaml(config: Config) -> str:
    """Write a config in its resolved form; `load` of the text gives the same config."""
    data = config.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


class _TextLoader(yaml.SafeLoader):
    """Reads every scalar as text, but for null; refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping whose keys all differ."""
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = node.value[number][0].start_mark.line + 1
                raise ValueError(f"line {line}: the key {key!r} stands twice")
        return super().construct_mapping(node, deep)


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file under its `extends:` parents, the parents' values first."""
    if path.resolve() in children:
        raise ConfigError([f"{path}: extends itself"])
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _TextLoader)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: a config is a mapping of sections, and this is none"])
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError([f"{path}: extends: must be the path of one parent file"])
    return _merge(_read(path.parent / parent, (*children, path.resolve())), data)


def _merge(
    below: dict[str, Any], above: dict[str, Any], section: type[BaseModel] = Config
) -> dict[str, Any]:
    """Lay one section over another; all else is replaced whole, mappings of the user's names too.

    Arms of a study added to the default ones would be another study.
    """
    merged = dict(below)
    for key, value in above.items():
        field, old = section.model_fields.get(key), merged.get(key)
        inner = section_of(field.annotation) if field else None
        both = inner is not None and isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value, inner) if both else value  # type: ignore[arg-type]
    return merged


def _apply(tree: DictConfig, override: str) -> Iterator[str]:
    """Set one `key=value`; yield what is wrong with it."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        yield f"{override!r} is no key=value"
        return
    *parents, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        name = _place(node, part)
        if name is None or (isinstance(name, str) and name not in node):
            yield _no_such(tuple(parents[:depth]), part, node, key)
            return
        node = node._get_node(name)
    name = _place(node, last)
    if name is None:
        yield _no_such(tuple(parents), last, node, key)
        return
    try:
        value = yaml.load(text, _TextLoader) if text else ""
    except (yaml.YAMLError, ValueError):
        value = text
    try:
        node[name] = value
    except OmegaConfBaseException as error:
        yield f"{key}: {_first_line(error)}"


def _place(node: Any, part: str) -> str | int | None:
    """Return the key or list index that `part` names in a node; None where it names none."""
    if isinstance(node, DictConfig):
        return part
    is_index = isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node)
    return int(part) if is_index else None


def _no_such(parents: Keys, part: str, node: Any, key: str) -> str:
    """Say why an override's key leads nowhere."""
    if isinstance(node, DictConfig):
        return unknown_key((*parents, part))
    if isinstance(node, ListConfig):
        return f"{key}: {dotted(parents)} has {len(node)} items, and none is {part!r}"
    return f"{key}: {dotted(parents)} has no keys in it"


def _resolve(node: Any, keys: Keys) -> tuple[Any, list[str]]:
    """Resolve every interpolation below a node; return plain data and the problems."""
    if not isinstance(node, DictConfig | ListConfig):
        return node, []
    plain: dict[Any, Any] = {}
    problems: list[str] = []
    names: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        path = (*keys, name)
        try:
            plain[name], below = _resolve(node[name], path)
        except OmegaConfBaseException as error:
            below = [f"{dotted(path)}: {_first_line(error)}"]
        problems += below
    return plain if isinstance(node, DictConfig) else list(plain.values()), problems


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
