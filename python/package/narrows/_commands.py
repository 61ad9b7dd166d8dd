"""The commands. Each takes the flags of the command of its name as keyword arguments."""

from __future__ import annotations

import csv
import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import _narrows
from ._arguments import Arguments, Flag, Model, PlanInput
from ._errors import NarrowsWarning, error
from ._results import (
    CheckResult,
    CompareResult,
    ExplainResult,
    ExportResult,
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


def cost(plan: PlanInput, **flags: Flag) -> Plan:
    """Predicted step time and memory of a plan, with flags that replace its sizes."""
    return Plan.of(_json("cost", [plan], flags))


def explain(plan: PlanInput, **flags: Flag) -> ExplainResult:
    """Why the fastest plan for the model, hardware and batch of a plan is the fastest, and how others compare."""
    return ExplainResult.of(_json("explain", [plan], flags))


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
    """The fastest plan for every combination of swept values, such as ``{"rank": [256, 512], "devices": "4..16*2"}``."""
    raw, rows = _json_and_rows("whatif", {"model": model, "sweep": sweep, **flags})
    return WhatIfResult(rows, raw.get("solution"), raw)


def sensitivity(model: Model, **flags: Flag) -> SensitivityResult:
    """How much the step time changes with every number of hardware, model and workload."""
    raw, rows = _json_and_rows("sensitivity", {"model": model, **flags})
    return SensitivityResult(rows, raw)


def _json_and_rows(command: str, flags: Mapping[str, Any]) -> tuple[Json, list[Row]]:
    with tempfile.TemporaryDirectory(prefix="narrows-") as folder:
        path = Path(folder) / "rows.csv"
        raw = _json(command, [], {**flags, "csv": path})
        with path.open(encoding="utf-8", newline="") as file:
            return raw, [_typed(row) for row in csv.DictReader(file)]


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
) -> Json:
    """The JSON answer of a command."""
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
        warnings.warn(messages.strip().removeprefix("warning: "), NarrowsWarning, stacklevel=3)
    answer: Json = json.loads(output)
    return answer
