"""Answers of commands. `raw` is the whole JSON answer; its keys carry their units."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
#: A row of a table: `pandas.DataFrame(rows)` takes a list of them.
Row = dict[str, Any]


@dataclass(frozen=True)
class ExactStep:
    """Exact steps of LORO and their time."""

    #: Steps from one exact step to the next.
    every: int
    #: FLOPs of all hosts in an exact step.
    host_flops: float
    #: Bytes between devices and hosts.
    bytes: int
    time_s: float
    #: `time_s` on average over all steps.
    per_step_s: float
    #: Provenance of the rates of hosts.
    rates: str

    @classmethod
    def of(cls, raw: Json) -> ExactStep:
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one optimizer step."""

    step_time_s: float
    #: 90 % interval of the step time.
    step_time_interval_s: tuple[float, float]
    tokens_per_s: float
    mfu: float
    flops_per_s_per_device: float
    #: Memory per device, for each pipeline stage.
    peak_memory_bytes: list[int]
    #: `None` without a limit.
    memory_limit_bytes: int | None
    #: Step time by kind of work; the sum is the step time.
    breakdown_s: dict[str, float]
    #: `None` for a plan without exact steps of LORO.
    exact_step: ExactStep | None
    #: Parts of the hardware profile that are assumed, not measured.
    assumed: list[str]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> Prediction:
        low, high = raw["step_time_interval_s"]
        exact_step = raw.get("exact_step")
        return cls(
            step_time_s=raw["step_time_s"],
            step_time_interval_s=(low, high),
            tokens_per_s=raw["tokens_per_s"],
            mfu=raw["mfu"],
            flops_per_s_per_device=raw["flops_per_s_per_device"],
            peak_memory_bytes=raw["peak_memory_bytes"],
            memory_limit_bytes=raw.get("memory_limit_bytes"),
            breakdown_s=raw["breakdown_s"],
            exact_step=None if exact_step is None else ExactStep.of(exact_step),
            assumed=raw["assumed"],
            raw=raw,
        )

    def row(self) -> Row:
        """The prediction as one row; exact steps of LORO have columns where the plan has them."""
        low, high = self.step_time_interval_s
        parts = {f"{name}_s": seconds for name, seconds in self.breakdown_s.items()}
        exact_step = {} if self.exact_step is None else vars(self.exact_step)
        return {
            "step_time_s": self.step_time_s,
            "step_time_low_s": low,
            "step_time_high_s": high,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_memory_bytes": max(self.peak_memory_bytes, default=0),
            **parts,
            **{f"exact_step_{name}": value for name, value in exact_step.items()},
        }


@dataclass(frozen=True)
class Search:
    """How a search ended."""

    #: `optimal`, `gap_limit`, `time_limit` or `infeasible`.
    status: str
    #: Relative distance to the proven bound; `None` without a plan.
    gap: float | None
    bound_s: float | None
    candidates_priced: int
    candidates_pruned: int
    wall_time_s: float
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> Search:
        names = ("status", "gap", "bound_s", "candidates_priced", "candidates_pruned", "wall_time_s")
        return cls(**{name: raw[name] for name in names}, raw=raw)


@dataclass(frozen=True)
class Plan:
    """A plan with its prediction: the answer of `plan` and of `cost`."""

    #: The content of the plan file.
    decisions: Json = field(repr=False)
    prediction: Prediction
    #: `None` for a plan file that was priced.
    search: Search | None
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> Plan:
        search = raw.get("search")
        return cls(
            decisions=raw["decisions"],
            prediction=Prediction.of(raw["prediction"]),
            search=None if search is None else Search.of(search),
            raw=raw,
        )

    @property
    def mesh(self) -> dict[str, int]:
        """Devices along each axis."""
        mesh: dict[str, int] = self.decisions["mesh"]
        return mesh

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file."""
        Path(path).write_text(json.dumps(self.decisions, indent=2) + "\n", encoding="utf-8")

    def row(self) -> Row:
        """Mesh, microbatch, ZeRO stage and prediction as one row."""
        workload = self.decisions["workload"]
        decided = {"micro_batch": workload["micro_batch"], "zero": self.decisions["zero"]}
        return {**self.mesh, **decided, **self.prediction.row()}


@dataclass(frozen=True)
class FrameworkCost:
    """A step of a full-rank model under another framework: the answer of `cost` with `framework`."""

    framework: str
    #: Mesh, workload and recomputation of the step.
    step: Json = field(repr=False)
    step_time_s: float
    #: 90 % interval of the step time.
    step_time_interval_s: tuple[float, float]
    tokens_per_s: float
    mfu: float
    flops_per_s_per_device: float
    #: Relative change of the step time for a relative change of one term.
    term_shares: dict[str, float]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> FrameworkCost:
        prediction = raw["prediction"]
        low, high = prediction["step_time_interval_s"]
        return cls(
            framework=raw["framework"]["name"],
            step=raw["step"],
            step_time_s=prediction["step_time_s"],
            step_time_interval_s=(low, high),
            tokens_per_s=prediction["tokens_per_s"],
            mfu=prediction["mfu"],
            flops_per_s_per_device=prediction["flops_per_s_per_device"],
            term_shares=prediction["term_shares"],
            raw=raw,
        )

    def row(self) -> Row:
        """Mesh and prediction as one row."""
        low, high = self.step_time_interval_s
        return {
            "framework": self.framework,
            **self.step["mesh"],
            "step_time_s": self.step_time_s,
            "step_time_low_s": low,
            "step_time_high_s": high,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


@dataclass(frozen=True)
class Alternative:
    """Another plan beside the chosen one."""

    name: str
    summary: str
    #: `None` where there is no such plan.
    prediction: Prediction | None
    #: Step time over that of the chosen plan.
    ratio: float | None
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> Alternative:
        prediction = raw.get("prediction")
        return cls(
            name=raw["name"],
            summary=raw["summary"],
            prediction=None if prediction is None else Prediction.of(prediction),
            ratio=raw.get("ratio"),
            raw=raw,
        )

    def row(self) -> Row:
        """Name, ratio and prediction as one row."""
        prediction = {} if self.prediction is None else self.prediction.row()
        return {"plan": self.name, "ratio": self.ratio, **prediction}


@dataclass(frozen=True)
class ExplainResult:
    """Why a plan is the fastest: the answer of `explain`."""

    chosen: Alternative
    alternatives: list[Alternative]
    #: What limits the step, one sentence each.
    binds: list[str]
    search: Search
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> ExplainResult:
        return cls(
            chosen=Alternative.of(raw["chosen"]),
            alternatives=[Alternative.of(other) for other in raw["alternatives"]],
            binds=raw["binds"],
            search=Search.of(raw["search"]),
            raw=raw,
        )

    @property
    def rows(self) -> list[Row]:
        """The chosen plan and its alternatives, one row each."""
        return [plan.row() for plan in (self.chosen, *self.alternatives)]


@dataclass(frozen=True)
class CheckStage:
    """The program of a pipeline stage in numbers."""

    instructions: int
    buffers: int
    collectives: dict[str, int]
    transfers: int
    microbatches_in_flight: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class CheckResult:
    """The proof of a plan, or its errors: the answer of `check`."""

    proven: bool
    stages: list[CheckStage]
    errors: list[Json]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> CheckResult:
        names = CheckStage.__dataclass_fields__
        stages = [CheckStage(**{name: stage[name] for name in names}) for stage in raw["stages"]]
        return cls(proven=raw["proven"], stages=stages, errors=raw["errors"], raw=raw)

    @property
    def rows(self) -> list[Row]:
        """The stages, one row each."""
        return [{"stage": index, **vars(stage)} for index, stage in enumerate(self.stages)]


@dataclass(frozen=True)
class WhatIfResult:
    """The plans of a sweep: the answer of `whatif`."""

    #: One row for each point, with the columns of `--csv`.
    rows: list[Row]
    #: The answer of `until`, if it was asked for.
    solution: Json | None
    raw: Json = field(repr=False)

    def plans(self) -> list[Plan | None]:
        """The plan of each point; `None` where there is none."""
        points = self.raw.get("points", [])
        return [Plan.of(point) if "decisions" in point else None for point in points]


@dataclass(frozen=True)
class SensitivityResult:
    """What a step time depends on: the answer of `sensitivity`."""

    #: One row for each number, with the columns of `--csv`.
    rows: list[Row]
    raw: Json = field(repr=False)


@dataclass(frozen=True)
class CompareResult:
    """Differences between plans of one model: the answer of `compare`."""

    #: The plans, in the order of the arguments, and at last that of `search`.
    plans: list[Plan]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> CompareResult:
        return cls(plans=[Plan.of(plan) for plan in raw["plans"]], raw=raw)

    @property
    def rows(self) -> list[Row]:
        """The plans, one row each."""
        return [
            {"plan": raw["name"], **plan.row()} for raw, plan in zip(self.raw["plans"], self.plans)
        ]

    def __getitem__(self, key: str) -> Any:
        return self.raw[key]


@dataclass(frozen=True)
class ExportResult:
    """A plan as the configuration of another framework: the answer of `export`."""

    framework: str
    #: The text of the configuration.
    configuration: str = field(repr=False)
    #: Every decision with its fate, one row each.
    decisions: list[Row] = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Json) -> ExportResult:
        return cls(raw["framework"], raw["configuration"], raw["decisions"], raw)
