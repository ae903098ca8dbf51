"""``docs/config.md`` from the config dataclasses: ``python -m trainers.config_docs``.

Prints the page. Key, type, default and meaning come from the declarations and their docstrings, so
the page says what the code does; a test compares the two.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from trainers.config import TrainConfig
from trainers.config_loader import to_tree
from trainers.config_yaml import dump_yaml

INTRODUCTION = """\
# Configuration

Written by `python -m trainers.config_docs > docs/config.md`. Do not edit it by hand: a test compares
it with the dataclasses.

## How a config is made

A run is described by one tree of frozen dataclasses, `trainers.config.TrainConfig`. Its defaults are
the vetted setting of the tiny pipeline; a YAML file and the command line say only what differs:

```bash
python -m recipes.grpo_qwen_image configs/qwen_image/tiny_cpu.yaml optim.lr=3e-4 seed=1 --dry-run
```

1. **Files** are merged from left to right onto the defaults, mapping by mapping. Without a file a
   recipe takes its own default one.
2. **Overrides** come last, whatever their place on the command line: `key.path=value`. The value is
   YAML: `optim.lr=3e-4`, `rollout.negative_prompt=null`, `model.lora={rank: 8}`.
3. **Lists are replaced**, never merged. A file that names one reward has one reward. An override may
   set one item of a list that a file gave: `rewards.0.weight=2`; items count from 0.
4. **Tagged unions**: a section marked "one of" has a key `type` that chooses the variant, and the other
   keys are those of that variant. Switching `type` drops the defaults of the old variant, but not keys
   that a file set: those are reported, since they mean nothing to the new one. So a variant is switched in
   a file of one's own, or in the file that set it.
5. **Derived values** (samples an iteration, number of chunks) are computed and are no keys.

The resolved config is written to `output_dir/config.yaml`; loading that file gives the same run.
`--dry-run` prints it, with the cost of an iteration, and exits.

## Strictness

Unknown keys, wrong types and values out of range stop the run before a model is loaded, all mistakes
at once, one line each: the key, what is wrong, the value, where it came from, the nearest valid key.

- `true` is no int, `1` is no bool, `10.5` is no int, and a bare number is no text. On the command line
  the field decides: `model.gradient_checkpointing=1` is true and `output_dir=7` is the folder `7`.
- `1e-4` is a float; YAML 1.1 would read it as text. `010`, `1:30` and dates are text.
- A key that is given twice in one file is an error. Anchors, aliases and tags are refused: files are
  merged instead.
- NaN and infinity are refused.
- `null` is written only where a key's type says so, and its meaning is told there.

## Schema

`trainers.config_loader.json_schema(TrainConfig)` gives the JSON schema. An editor that is given it (for
example by the comment `# yaml-language-server: $schema=schema.json`) completes and checks the YAML.

## Keys
"""


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_section(TrainConfig, "", "### Top level"), ""])


def undocumented() -> list[str]:
    """The keys whose meaning the page would leave empty: their fields need a docstring."""
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    return [cells[0].strip("| `") for cells in rows if cells[-1].strip(" |") == ""]


def _section(cls: Any, prefix: str, title: str) -> Iterator[str]:
    """The table of a dataclass, then the sections of its fields."""
    yield title
    yield ""
    yield _line(inspect.getdoc(cls) or "")
    yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    hints = get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    below: list[Iterator[str]] = []
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        key = f"{prefix}.{name}" if prefix else name
        parts = [kind for kind in _leaves(hint) if dataclasses.is_dataclass(kind)]
        shown = _shown(_default(field), is_section=bool(parts))
        meaning = docs.get(name, "")
        if not meaning and parts:
            meaning = _line(inspect.getdoc(parts[0]) or "")
        if not meaning and name == "type":
            meaning = "Chooses the variant."
        yield f"| `{key}` | {_cell(_type(hint))} | {_cell(shown)} | {_cell(meaning)} |"
        for kind in parts:
            path = f"{key}.N" if get_origin(hint) is tuple else key
            variant = f", with `type: {_tag(kind)}`" if len(parts) > 1 else ""
            below.append(_section(kind, path, f"### `{path}`{variant}"))
    for section in below:
        yield ""
        yield from section


def field_docs(cls: Any) -> dict[str, str]:
    """The docstring under each field of a dataclass, or of the one it is inherited from, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _own_docs(base)
    return docs


def _own_docs(cls: Any) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for before, after in itertools.pairwise(tree.body):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[before.target.id] = _line(str(after.value.value))
    return docs


def _leaves(hint: Any) -> list[Any]:
    """The classes in a hint, through unions, ``Annotated`` and tuples."""
    if get_origin(hint) is Annotated:
        return _leaves(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return [leaf for argument in get_args(hint) for leaf in _leaves(argument)]
    return [hint]


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        if sum(dataclasses.is_dataclass(argument) for argument in arguments) > 1:
            return "one of " + ", ".join(_tag(a) for a in arguments if dataclasses.is_dataclass(a))
        return " or ".join(_type(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(dump_yaml(value).splitlines()[0] for value in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type(arguments[0])}"
        return f"list of {len(arguments)} {_type(arguments[0])}"
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint) or (origin and issubclass(origin, Mapping)):
        return "mapping"
    return {str: "text"}.get(hint, getattr(hint, "__name__", str(hint)))


def _tag(kind: Any) -> str:
    (tag,) = get_args(get_type_hints(kind)["type"])
    return str(tag)


_REQUIRED = object()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is dataclasses.MISSING else field.default


def _shown(value: Any, *, is_section: bool) -> str:
    if value is _REQUIRED:
        return "required"
    if is_section and dataclasses.is_dataclass(value):
        tag = getattr(value, "type", None)
        return f"`type: {tag}`" if tag else "below"
    if isinstance(value, tuple):
        items = [_flow(to_tree(v) if dataclasses.is_dataclass(v) else v) for v in value]
        return f"`[{', '.join(items)}]`"
    return f"`{_flow(value)}`"


def _flow(value: Any) -> str:
    """YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return dump_yaml(value).splitlines()[0]


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
