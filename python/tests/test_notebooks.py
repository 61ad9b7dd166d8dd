"""The notebooks of `examples/` show the output of their cells; `NARROWS_BLESS=1` writes it."""

import ast
import contextlib
import importlib.util
import io
import json
import os
import pprint
import unittest
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(source: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """What a cell prints, and the value of its last line as Jupyter shows it; `None` if that is no expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = last and eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), None if value is None else pprint.pformat(value, sort_dicts=False)


def _outputs(cell: dict[str, Any], names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell in the format of notebooks."""
    printed, value = _run("".join(cell["source"]), names)
    outputs: list[dict[str, Any]] = []
    if printed:
        lines = printed.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        outputs.append(
            {
                "data": {"text/plain": value.splitlines(keepends=True)},
                "execution_count": cell["execution_count"],
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


@unittest.skipUnless(importlib.util.find_spec("pandas"), "the notebooks need pandas")
class Notebooks(unittest.TestCase):
    def test_notebooks_show_the_output_of_their_cells(self) -> None:
        import pandas

        # As in Jupyter, which has no terminal.
        pandas.set_option("display.max_columns", 20)
        pandas.set_option("display.width", 80)
        self.maxDiff = None
        paths = sorted(EXAMPLES.glob("*.ipynb"))
        self.assertTrue(paths)
        for path in paths:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            names: dict[str, Any] = {}
            cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            shown = [cell["outputs"] for cell in cells]
            for cell in cells:
                cell["outputs"] = _outputs(cell, names)
            if "NARROWS_BLESS" in os.environ:
                text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
                path.write_text(text, encoding="utf-8")
            else:
                outputs = [cell["outputs"] for cell in cells]
                self.assertEqual(shown, outputs, f"{path.name}: NARROWS_BLESS=1 writes the output")


if __name__ == "__main__":
    unittest.main()
