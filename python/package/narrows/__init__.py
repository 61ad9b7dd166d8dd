"""Plans of the training of low-rank language models, priced, explained and checked.

Every function runs the command of `narrows` with its name, in this process: keyword arguments are its flags, with
underscores for hyphens (``narrows plan --help`` has them all), and the result is its JSON answer with types. The
interpreter's lock is free meanwhile, and Ctrl-C stops a search.

>>> import narrows
>>> plan = narrows.plan("cola-60m", devices=4, global_batch=8)
>>> plan.mesh
{'tensor': 1, 'pipeline': 1, 'data': 4}
"""

from ._arguments import Flag, Model, PlanInput
from ._commands import check, compare, cost, explain, export, plan, sensitivity, whatif
from ._errors import EnvironmentFailure, InvalidInput, NarrowsError, NarrowsWarning, NoAnswer
from ._narrows import __version__
from ._results import (
    Alternative,
    CheckResult,
    CheckStage,
    CompareResult,
    ExactStep,
    ExplainResult,
    ExportResult,
    FrameworkCost,
    Plan,
    Prediction,
    Search,
    SensitivityResult,
    WhatIfResult,
)

__all__ = [
    "Alternative",
    "CheckResult",
    "CheckStage",
    "CompareResult",
    "EnvironmentFailure",
    "ExactStep",
    "ExplainResult",
    "ExportResult",
    "Flag",
    "FrameworkCost",
    "InvalidInput",
    "Model",
    "NarrowsError",
    "NarrowsWarning",
    "NoAnswer",
    "Plan",
    "PlanInput",
    "Prediction",
    "Search",
    "SensitivityResult",
    "WhatIfResult",
    "__version__",
    "check",
    "compare",
    "cost",
    "explain",
    "export",
    "plan",
    "sensitivity",
    "whatif",
]
