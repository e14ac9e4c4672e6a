"""From plain data to typed sections, with every problem found at once and said in one line.

pydantic finds what is wrong within a field; sections are asked about their own fields, and
`configs.checks` about what lies across them.
"""

import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.checks import CHECKS, CHECKS_OF_WHOLE_SECTIONS
from configs.schema import Config

Keys = tuple[str | int, ...]
"""The path of a key: names and list indices."""


def validate(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Make every section; return them and every problem, within and across sections."""
    problems = [unknown_key((name,)) for name in data if name not in Config.model_fields]
    sections: dict[str, Any] = {}
    bad: set[str] = set()
    for name, field in Config.model_fields.items():
        section_type = _section_in(field.annotation)
        assert section_type is not None
        section, errors = _section(section_type, data.get(name, {}), (name,))
        problems += [line for _, line in errors]
        bad |= {dotted(keys) for keys, _ in errors}
        if section is not None:
            sections[name] = section
            problems += [
                f"{key}: {message}"
                for key, message in _own_problems(section, name)
                if not _touches(key, bad)
            ]
    for check in (*CHECKS, *CHECKS_OF_WHOLE_SECTIONS):
        needed = inspect.signature(check).parameters
        if not all(name in sections for name in needed):
            continue
        if check in CHECKS_OF_WHOLE_SECTIONS and any(_touches(name, bad) for name in needed):
            continue
        found = check(**{name: sections[name] for name in needed})
        problems += [f"{key}: {text}" for key, text in found if not _touches(key, bad)]
    return sections, problems


def _section(
    section_type: type[BaseModel], data: Any, keys: Keys
) -> tuple[Any, list[tuple[Keys, str]]]:
    """Make one section; where fields are wrong, once more without them, for the checks.

    A wrong field takes its default then, and one that has none a stand-in of its type.
    """
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
    except ValidationError as error:
        missing = [_field_keys((), d["loc"]) for d in error.errors() if d["type"] == "missing"]
    for stand_in in (1, "stand-in"):
        for loc in missing:
            with_it = _with(rest, loc, stand_in)
            wrong = {d["loc"] for d in _errors(section_type, with_it)}
            rest = rest if loc in wrong else with_it
    section = None if _errors(section_type, rest) else section_type.model_validate(rest)
    return section, found


def _errors(section_type: type[BaseModel], data: Any) -> list[ErrorDetails]:
    try:
        section_type.model_validate(data)
    except ValidationError as error:
        return error.errors()
    return []


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


def _with(data: Any, loc: Keys, value: Any) -> Any:
    """Copy data with another value at `loc`, where there is a place for it."""
    if not loc:
        return value
    head, *tail = loc
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    try:
        below = copy[head] if tail else None
    except (KeyError, IndexError):
        return data
    copy[head] = _with(below, tuple(tail), value)
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
    name = dotted(path)
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(path)
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


def unknown_key(path: Keys) -> str:
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
        if (section := section_of(field.annotation)) is not None:
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


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return a field's type where that is a section."""
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type: itself, or that of a list's items."""
    if (section := section_of(annotation)) is not None:
        return section
    return next((s for part in get_args(annotation) if (s := _section_in(part))), None)


def dotted(keys: Keys) -> str:
    """Write a path as users do."""
    return ".".join(str(key) for key in keys)


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a section and of those in it, so that interpolation sees them."""
    defaults: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            defaults[name] = defaults_of(section)
        elif not field.is_required():
            defaults[name] = field.get_default(call_default_factory=True)
    return defaults
