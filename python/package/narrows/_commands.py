"""The commands. Each takes the flags of the command of its name as keyword arguments."""

from __future__ import annotations

import csv
import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, overload

from . import _narrows
from ._arguments import Arguments, Flag, Model, PlanInput
from ._errors import NarrowsWarning, error
from ._results import (
    CheckResult,
    CompareResult,
    ExplainResult,
    ExportResult,
    FrameworkCost,
    Json,
    Plan,
    Row,
    SensitivityResult,
    WhatIfResult,
)


def plan(model: Model, **flags: Flag) -> Plan:
    """The fastest plan of a request.

    Raises `NoAnswer` where no plan exists, with the reasons and what would help.
    """
    return Plan.of(_json("plan", [], {"model": model, **flags}))


@overload
def cost(plan: PlanInput, *, model: Model | None = None, **flags: Flag) -> Plan: ...


@overload
def cost(plan: None = None, *, model: Model, **flags: Flag) -> Plan | FrameworkCost: ...


def cost(
    plan: PlanInput | None = None, *, model: Model | None = None, **flags: Flag
) -> Plan | FrameworkCost:
    """Predicted step time and memory of a plan, with flags that replace its sizes.

    Without a plan, those of the fastest plan for a `model`; with `framework="megatron"` or another one, the step time of
    a full-rank model as that framework trains it, a `FrameworkCost`.
    """
    raw = _json("cost", _given(plan), {**_model_flag(model), **flags})
    return FrameworkCost.of(raw) if "framework" in raw else Plan.of(raw)


def explain(
    plan: PlanInput | None = None, *, model: Model | None = None, **flags: Flag
) -> ExplainResult:
    """Why the fastest plan for the model, hardware and batch of a plan is the fastest, and how others compare.

    Without a plan, those of a request: a `model`, and flags as `plan` takes them.
    """
    return ExplainResult.of(_json("explain", _given(plan), {**_model_flag(model), **flags}))


def check(plan: PlanInput, **flags: Flag) -> CheckResult:
    """The proof that a plan is correct. A plan with errors gives a result that is not `proven`."""
    return CheckResult.of(_json("check", [plan], flags, may_fail=True))


def compare(*plans: PlanInput, **flags: Flag) -> CompareResult:
    """Differences between plans of one model: decisions, step time, memory and communication."""
    return CompareResult.of(_json("compare", plans, flags))


def export(plan: PlanInput, to: str, **flags: Flag) -> ExportResult:
    """A plan as the configuration of `megatron`, `nanotron` or `torchtitan`.

    Raises `NoAnswer` where the framework cannot express a decision, unless `allow_loss` is `True`.
    """
    return ExportResult.of(_json("export", [plan], {"to": to, **flags}))


def whatif(
    model: Model,
    *,
    sweep: Mapping[str, Iterable[Any] | str] | Iterable[str] | str | None = None,
    **flags: Flag,
) -> WhatIfResult:
    """The fastest plan for every combination of swept values, such as ``{"rank": [256, 512], "devices": "4..16*2"}``.

    With ``list=True``, nothing is planned, and the fields that can be swept are in ``raw["fields"]``.
    """
    raw, rows = _json_and_rows("whatif", {"model": model, "sweep": sweep, **flags})
    return WhatIfResult(rows, raw.get("solution"), raw)


def sensitivity(model: Model, **flags: Flag) -> SensitivityResult:
    """How much the step time changes with every number of hardware, model and workload."""
    raw, rows = _json_and_rows("sensitivity", {"model": model, **flags})
    return SensitivityResult(rows, raw)


def _json_and_rows(command: str, flags: Mapping[str, Any]) -> tuple[Json, list[Row]]:
    """The JSON answer of a command, and the rows of its CSV file: that of `csv`, or else a temporary one."""
    with tempfile.TemporaryDirectory(prefix="narrows-") as folder:
        given = flags.get("csv")
        path = Path(folder) / "rows.csv" if given is None else Path(given)
        if path.exists() and not path.is_file():
            raise TypeError(f"{command}(): csv must be a file, since its rows are read again, not {given!r:.80}")
        raw = _json(command, [], {**flags, "csv": path}, callers=2)
        if "fields" in raw:
            return raw, []
        with path.open(encoding="utf-8", newline="") as file:
            return raw, [_typed(row) for row in csv.DictReader(file)]


def _given(plan: PlanInput | None) -> list[PlanInput]:
    return [] if plan is None else [plan]


def _model_flag(model: Model | None) -> dict[str, Any]:
    return {} if model is None else {"model": model}


def _typed(row: Mapping[str, str]) -> Row:
    """A row of CSV with numbers and booleans; `None` for empty cells."""

    def value(cell: str) -> Any:
        if cell in ("true", "false"):
            return cell == "true"
        for number in (int, float):
            try:
                return number(cell)
            except ValueError:
                pass
        return cell or None

    return {name: value(cell) for name, cell in row.items()}


def _json(
    command: str,
    inputs: Iterable[PlanInput],
    flags: Mapping[str, Any],
    *,
    may_fail: bool = False,
    callers: int = 1,
) -> Json:
    """The JSON answer of a command. `callers` is the number of functions of this module that call one another."""
    with tempfile.TemporaryDirectory(prefix="narrows-") as folder:
        arguments = Arguments(command, folder)
        plans = list(inputs)
        names = ["plan"] if len(plans) == 1 else [f"plans[{index}]" for index in range(len(plans))]
        paths = [arguments.input(name, plan) for name, plan in zip(names, plans)]
        arguments.add_flags(flags)
        words = [*arguments.words, "--format=json", *(["--", *paths] if paths else [])]
        exit_code, output, messages = _narrows.answer(words)
        output, messages = arguments.named(output), arguments.named(messages)
    if exit_code != 0 and not (may_fail and exit_code == 1 and output):
        raise error(messages, exit_code)
    if exit_code == 0 and messages:
        text = messages.strip().removeprefix("warning: ")
        warnings.warn(text, NarrowsWarning, stacklevel=2 + callers)
    answer: Json = json.loads(output)
    return answer
