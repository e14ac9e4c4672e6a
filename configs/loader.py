"""Loads a config: defaults, then the file and its parents, then `key=value`; strict and typed.

Every scalar stays text until the type of its field is known, so `1e-5` is a number where a number
belongs, and `24:00:00` or `695e0514` stay strings where a string belongs, whatever YAML thinks of
them. OmegaConf resolves the interpolations.
"""

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.checks import CHECKS
from configs.schema import Config

Keys = tuple[str | int, ...]


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
    tree = OmegaConf.create(_merge(_defaults(Config), _read(Path(path))))
    for override in overrides:
        problems += _apply(tree, override)
    data, unresolved = _resolve(tree, ())
    problems += unresolved
    sections, invalid = _validate(data)
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


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another; lists and scalars are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a section and of those in it, so that interpolation sees them."""
    defaults: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if (section := _section_of(field.annotation)) is not None:
            defaults[name] = _defaults(section)
        elif not field.is_required():
            defaults[name] = field.get_default(call_default_factory=True)
    return defaults


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
        node[name] = yaml.load(text, _TextLoader) if text else ""
    except (yaml.YAMLError, ValueError):
        node[name] = text


def _place(node: Any, part: str) -> str | int | None:
    """Return the key or list index that `part` names in a node; None where it names none."""
    if isinstance(node, DictConfig):
        return part
    is_index = isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node)
    return int(part) if is_index else None


def _no_such(parents: Keys, part: str, node: Any, key: str) -> str:
    """Say why an override's key leads nowhere."""
    if isinstance(node, DictConfig):
        return _unknown((*parents, part))
    if isinstance(node, ListConfig):
        return f"{key}: {_dotted(parents)} has {len(node)} items, and none is {part!r}"
    return f"{key}: {_dotted(parents)} has no keys in it"


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
            below = [f"{_dotted(path)}: {str(error).splitlines()[0]}"]
        problems += below
    return plain if isinstance(node, DictConfig) else list(plain.values()), problems


def _validate(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Make every section; return them and every problem, within and across sections."""
    problems = [_unknown((name,)) for name in data if name not in Config.model_fields]
    sections: dict[str, Any] = {}
    bad: set[str] = set()
    for name, field in Config.model_fields.items():
        section_type = _section_in(field.annotation)
        assert section_type is not None
        section, errors = _section(section_type, data.get(name, {}), (name,))
        problems += [line for _, line in errors]
        bad |= {_dotted(keys) for keys, _ in errors}
        if section is not None:
            sections[name] = section
            problems += [
                f"{key}: {message}"
                for key, message in _own_problems(section, name)
                if not _touches(key, bad)
            ]
    for check in CHECKS:
        needed = inspect.signature(check).parameters
        if all(name in sections for name in needed):
            found = check(**{name: sections[name] for name in needed})
            problems += [f"{key}: {text}" for key, text in found if not _touches(key, bad)]
    return sections, problems


def _section(
    section_type: type[BaseModel], data: Any, keys: Keys
) -> tuple[Any, list[tuple[Keys, str]]]:
    """Make one section; where fields are wrong, once more with their defaults, for the checks."""
    try:
        return section_type.model_validate(data), []
    except ValidationError as error:
        details = error.errors()
    found = [(_field_keys(keys, d["loc"]), _explain(keys, d)) for d in details]
    rest = data
    for detail in details:
        rest = _without(rest, detail["loc"])
    try:
        return section_type.model_validate(rest), found
    except ValidationError:
        return None, found


def _own_problems(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Ask a section, and the sections in it, for problems among their own fields."""
    for field, message in section.problems():
        yield f"{prefix}.{field}", message
    for name in type(section).model_fields:
        value = getattr(section, name)
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, BaseModel):
                below = f"{prefix}.{name}" if index is None else f"{prefix}.{name}.{index}"
                yield from _own_problems(item, below)


def _touches(key: str, bad: set[str]) -> bool:
    """Whether a problem's key lies at, above or below one that is already reported."""
    return any(f"{key}.".startswith(f"{b}.") or f"{b}.".startswith(f"{key}.") for b in bad)


def _without(data: Any, loc: Keys) -> Any:
    """Copy data without the item at `loc`."""
    if not loc or not isinstance(data, dict | list):
        return data
    head, *tail = loc
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    try:
        if tail and isinstance(copy[head], dict | list):
            copy[head] = _without(copy[head], tuple(tail))
        elif isinstance(copy, dict):
            del copy[head]
    except (KeyError, IndexError, TypeError):
        pass  # a missing key: there is nothing to leave out
    return copy


def _field_keys(keys: Keys, loc: Keys) -> Keys:
    """Return an error's path; pydantic adds '[key]' for keys and type names for unions."""
    kept = [part for part in loc if isinstance(part, int) or part.replace("_", "a").isalnum()]
    known: list[str | int] = list(keys)
    section: type[BaseModel] | None = _section_at(keys)
    for part in kept:
        if section is None and isinstance(part, str) and part in ("str", "int", "list", "literal"):
            break
        known.append(part)
        section = _section_at(tuple(known))
    return tuple(known)


_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}


def _explain(keys: Keys, detail: ErrorDetails) -> str:
    """Say one pydantic error in one line: the key, what was expected, what was found."""
    path, kind, value = _field_keys(keys, detail["loc"]), detail["type"], detail["input"]
    name = _dotted(path)
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return f"{name}: needs a value"
    if value is None:
        return f"{name}: null is not allowed here"
    if kind == "literal_error":
        expected = str(context["expected"])
        close = difflib.get_close_matches(str(value), re.findall("'([^']*)'", expected), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{name}: must be {expected}, and is {value!r}{hint}"
    if kind in _EXPECTED:
        return f"{name}: must be {_EXPECTED[kind]}, and is {value!r}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    return (
        f"{name}: must {message}, and is {value!r}"
        if message[:3] == "be "
        else (f"{name}: {message}, and is {value!r}")
    )


def _unknown(path: Keys) -> str:
    """Say that a key is unknown, and which known one is nearest: here, or in another section."""
    *above, last = path
    name, prefix = str(last), "".join(f"{key}." for key in above)
    section = _section_at(tuple(above))
    known = list(section.model_fields) if section else []
    elsewhere = getattr(section, "set_elsewhere", {})
    if name in elsewhere:
        return f"{prefix}{name}: is not set here, but by {elsewhere[name]}"
    close = [prefix + key for key in difflib.get_close_matches(name, [*known, *elsewhere], 1)]
    close += [key for key in _all_keys(Config) if key.rpartition(".")[2] == name]
    close += [prefix + key for key in difflib.get_close_matches(name, known, 1, cutoff=0.0)]
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{prefix}{name}: unknown key{hint}"


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every field."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if (section := _section_of(field.annotation)) is not None:
            yield from _all_keys(section, f"{prefix}{name}.")


def _section_at(path: Keys) -> type[BaseModel] | None:
    """Return the section class that stands at a path, None where there is none."""
    section: type[BaseModel] | None = Config
    for part in path:
        if isinstance(part, int) or part.isdecimal():
            continue
        field = section.model_fields.get(part) if section else None
        section = _section_in(field.annotation) if field else None
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return a field's type where that is a section."""
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type: itself, or that of a list's items."""
    if (section := _section_of(annotation)) is not None:
        return section
    return next((s for part in get_args(annotation) if (s := _section_in(part))), None)


def _dotted(keys: Keys) -> str:
    return ".".join(str(key) for key in keys)
