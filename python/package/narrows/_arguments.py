"""Parameters as arguments of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from ._results import Plan

Scalar = Union[str, int, float, bool, "os.PathLike[str]"]
#: A value of a flag. `True` is a flag without a value, `None` and `False` leave it out, a list repeats it.
Flag = Union[Scalar, Iterable[Scalar], None]
#: A model: a preset, a file, or the content of a model file or of a Hugging Face `config.json`.
Model = Union[str, "os.PathLike[str]", Mapping[str, Any]]
#: A plan: a file, its content, or the result of `plan`.
PlanInput = Union[str, "os.PathLike[str]", Mapping[str, Any], "Plan"]


#: Flags whose output is for people.
_UNFIT = ("help", "version", "format")


class Arguments:
    """Arguments of a command. Values that the command reads from files are written into `folder`."""

    def __init__(self, command: str, folder: str) -> None:
        self.words = [command]
        self._folder = Path(folder)
        self._names: dict[str, str] = {}

    def input(self, name: str, value: Model | PlanInput) -> str:
        """The path of a file with this content; a name or path is returned as it is."""
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        content = value if isinstance(value, Mapping) else getattr(value, "decisions", None)
        if content is None or (name in ("model", "hardware") and content is not value):
            accepted = "a name, a path or the content of a file"
            if name not in ("model", "hardware"):
                accepted = "a path, the content of a plan file or the result of plan()"
            raise TypeError(f"{self.words[0]}(): {name} must be {accepted}, not {value!r:.80}")
        path = self._folder / f"{name}.json"
        try:
            text = json.dumps(dict(content))
        except TypeError as error:
            raise TypeError(f"{self.words[0]}(): {name} is not JSON: {error}") from None
        path.write_text(text, encoding="utf-8")
        self._names[str(path)] = name
        return str(path)

    def named(self, text: str) -> str:
        """A text with the names of arguments in place of their files."""
        for path, name in self._names.items():
            # In JSON, the separators of Windows are escaped.
            text = text.replace(json.dumps(path)[1:-1], name).replace(path, name)
        return text

    def add_flags(self, flags: Mapping[str, Any]) -> None:
        """Appends flags, with hyphens for underscores in their names."""
        for name, value in flags.items():
            if name in _UNFIT:
                raise TypeError(f"{self.words[0]}() has no keyword argument '{name}': its result is an object")
            flag = "--" + name.rstrip("_").replace("_", "-")
            if name == "model" or (name == "hardware" and isinstance(value, Mapping)):
                value = self.input(name, value)
            elif name == "sweep" and isinstance(value, Mapping):
                value = [f"{field}={_values(values)}" for field, values in value.items()]
            is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
            for item in value if is_list else [value]:
                if item is True:
                    self.words.append(flag)
                elif item is not None and item is not False:
                    self.words.append(f"{flag}={os.fspath(item) if isinstance(item, os.PathLike) else item}")


def _values(values: Any) -> str:
    """Values of a swept field: a list, or text such as `4..16*2`."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return ",".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return str(values)
