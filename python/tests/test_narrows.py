"""Tests of the package `narrows`, with the standard library alone: `python -m unittest discover python/tests`."""

import copy
import csv
import importlib.metadata
import json
import os
import pickle
import signal
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path

import narrows

MODELS = Path(__file__).parents[2] / "models"
REQUEST = {"devices": 2, "global_batch": 4, "sequence_length": 128}


class Plans(unittest.TestCase):
    def setUp(self) -> None:
        self.plan = narrows.plan("cola-tiny", **REQUEST)

    def test_a_plan_has_types_and_units(self) -> None:
        prediction = self.plan.prediction
        low, high = prediction.step_time_interval_s
        self.assertLess(low, prediction.step_time_s)
        self.assertLess(prediction.step_time_s, high)
        self.assertAlmostEqual(sum(prediction.breakdown_s.values()), prediction.step_time_s)
        self.assertIn(self.plan.search.status, ("optimal", "gap_limit"))
        self.assertEqual(self.plan.row()["data"], self.plan.mesh["data"])

    def test_plans_are_priced_checked_explained_and_compared(self) -> None:
        priced = narrows.cost(self.plan)
        self.assertEqual(priced.prediction, self.plan.prediction)
        self.assertIsNone(priced.search)
        self.assertGreater(narrows.cost(self.plan, global_batch=8).prediction.step_time_s, 0)
        self.assertTrue(narrows.check(self.plan).proven)
        explained = narrows.explain(self.plan)
        self.assertEqual(explained.rows[0]["step_time_s"], self.plan.prediction.step_time_s)
        other = narrows.plan("cola-tiny", tensor=2, **REQUEST)
        compared = narrows.compare(self.plan, other)
        self.assertEqual(len(compared["plans"]), 2)
        self.assertEqual([row["tensor"] for row in compared.rows], [self.plan.mesh["tensor"], 2])
        self.assertIn("step_time_s=", repr(compared))

    def test_exact_steps_of_loro_are_typed_columns(self) -> None:
        self.assertIsNone(self.plan.prediction.exact_step)
        request = {"devices": 1, "global_batch": 2, "sequence_length": 128}
        prediction = narrows.plan("svd-60m", loro_every=50, **request).prediction
        exact_step = prediction.exact_step
        self.assertEqual((exact_step.every, exact_step.rates), (50, "assumed"))
        self.assertAlmostEqual(exact_step.time_s, 50 * exact_step.per_step_s)
        self.assertEqual(prediction.row()["exact_step_per_step_s"], exact_step.per_step_s)
        self.assertNotIn("exact_step_every", self.plan.prediction.row())

    def test_every_table_of_rows_is_an_attribute(self) -> None:
        swept = narrows.whatif("cola-tiny", sweep={"rank": [16]}, **REQUEST)
        for result in (narrows.explain(self.plan), narrows.check(self.plan), swept):
            self.assertIsInstance(result.rows[0], dict)

    def test_a_file_a_path_and_its_content_are_one_plan(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            self.plan.save(path)
            for same in (path, str(path), json.loads(path.read_text())):
                self.assertEqual(narrows.cost(same).prediction, self.plan.prediction)

    def test_results_and_errors_name_arguments_instead_of_files(self) -> None:
        compared = narrows.compare(self.plan, self.plan.decisions)
        self.assertNotIn(tempfile.gettempdir(), json.dumps(compared.raw))
        self.assertIn("plans[1]", json.dumps(compared.raw["plans"][1]))
        for command, expected in (
            (lambda: narrows.check({}), "plan: "),
            (lambda: narrows.compare(self.plan, {}), "plans[1]: "),
            (lambda: narrows.plan({"hidden": 8}), "model: "),
            (lambda: narrows.plan("cola-tiny", hardware={"x": 1}), "hardware: "),
        ):
            with self.assertRaises(narrows.InvalidInput) as raised:
                command()
            self.assertIn(expected, str(raised.exception))
            self.assertNotIn(tempfile.gettempdir(), str(raised.exception))

    def test_an_edited_plan_is_not_proven_or_invalid(self) -> None:
        edited = json.loads(json.dumps(self.plan.decisions))
        edited["mesh"]["data"] = 3
        with self.assertRaises(narrows.InvalidInput) as raised:
            narrows.check(edited)
        self.assertIn("workload.global_batch", str(raised.exception))

    def test_a_plan_is_exported_or_refused(self) -> None:
        with self.assertRaisesRegex(narrows.NoAnswer, "model.linears"):
            narrows.export(self.plan, "megatron")
        exported = narrows.export(self.plan, "megatron", allow_loss=True)
        self.assertIn("--num-layers", exported.configuration)


class Requests(unittest.TestCase):
    def test_models_are_names_files_and_mappings(self) -> None:
        path = MODELS / "mixed-ranks.json"
        by_path = narrows.plan(path, devices=1)
        by_content = narrows.plan(json.loads(path.read_text()), devices=1)
        self.assertEqual(by_path.prediction.step_time_s, by_content.prediction.step_time_s)

    def test_a_sweep_has_a_row_for_each_point(self) -> None:
        sweep = {"rank": [16, 32], "devices": "1..2*2"}
        result = narrows.whatif("cola-tiny", sweep=sweep, global_batch=4, sequence_length=128)
        settings = [(row["rank"], row["devices"]) for row in result.rows]
        self.assertEqual(settings, [(16, 1), (16, 2), (32, 1), (32, 2)])
        times = [plan.prediction.step_time_s for plan in result.plans()]
        self.assertEqual(times, [row["step_time_s"] for row in result.rows])

    def test_booleans_of_a_sweep_are_booleans(self) -> None:
        sweep = {"model.tied": [False, True]}
        result = narrows.whatif("cola-tiny", sweep=sweep, devices=1, sequence_length=128)
        self.assertEqual([row["model.tied"] for row in result.rows], [False, True])

    def test_errors_have_the_message_and_the_exit_code(self) -> None:
        with self.assertRaises(narrows.InvalidInput) as raised:
            narrows.plan("cola-7")
        self.assertIsInstance(raised.exception, ValueError)
        self.assertEqual(raised.exception.exit_code, 2)
        self.assertIn("did you mean cola-7b?", str(raised.exception))
        with self.assertRaisesRegex(narrows.InvalidInput, "--no-such-flag"):
            narrows.plan("cola-tiny", no_such_flag=1)
        with self.assertRaises(narrows.InvalidInput) as raised:
            narrows.plan("cola-tiny", devices="two")
        self.assertNotIn("--help", str(raised.exception))
        with self.assertRaisesRegex(narrows.NoAnswer, "no plan exists") as raised:
            narrows.plan("cola-7b", devices=4, memory_limit="8GiB")
        self.assertEqual(raised.exception.exit_code, 1)

    def test_values_of_other_types_are_type_errors(self) -> None:
        for command, expected in (
            (lambda: narrows.cost(5), "cost.*plan must be a path, .* not 5"),
            (lambda: narrows.check(5), "check.*plan must be a path, .* not 5"),
            (lambda: narrows.compare("a.json", 3), r"compare.*plans\[1\] must be a path, .* not 3"),
            (lambda: narrows.explain(3), "explain.*plan must be a path, .* not 3"),
            (lambda: narrows.plan(None), "plan.*model must be a name, .* not None"),
            (lambda: narrows.plan({"hidden": {1}}), "model is not JSON"),
            (lambda: narrows.plan("cola-tiny", help=True), "no keyword argument 'help'"),
            (lambda: narrows.plan("cola-tiny", version=True), "no keyword argument 'version'"),
            (lambda: narrows.plan("cola-tiny", format="text"), "no keyword argument 'format'"),
        ):
            with self.assertRaisesRegex(TypeError, expected):
                command()

    def test_errors_can_be_pickled_and_copied(self) -> None:
        with self.assertRaises(narrows.InvalidInput) as raised:
            narrows.plan("cola-7")
        error = raised.exception
        for same in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
            self.assertIs(type(same), narrows.InvalidInput)
            self.assertEqual((str(same), same.exit_code), (str(error), 2))

    def test_rows_are_written_to_the_file_of_the_caller(self) -> None:
        request = {"devices": 1, "sequence_length": 128}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.csv"
            swept = narrows.whatif("cola-tiny", sweep={"rank": [16, 32]}, csv=path, **request)
            with path.open(newline="") as file:
                ranks = [row["rank"] for row in csv.DictReader(file)]
            self.assertEqual((ranks, [row["rank"] for row in swept.rows]), (["16", "32"], [16, 32]))
            studied = narrows.sensitivity("cola-tiny", csv=str(path), **request)
            with path.open(newline="") as file:
                self.assertEqual(len(list(csv.DictReader(file))), len(studied.rows))
            with self.assertRaisesRegex(narrows.InvalidInput, "cannot be written"):
                narrows.sensitivity("cola-tiny", csv=Path(folder) / "none" / "rows.csv", **request)
            with self.assertRaisesRegex(TypeError, "csv must be a file"):
                narrows.whatif("cola-tiny", sweep={"rank": [16]}, csv=folder, **request)

    def test_a_list_of_fields_has_no_rows(self) -> None:
        listed = narrows.whatif("cola-tiny", list=True)
        self.assertEqual((listed.rows, listed.plans()), ([], []))
        self.assertIn("rank", [field["name"] for field in listed.raw["fields"]])

    def test_a_model_without_a_plan_is_planned_and_explained(self) -> None:
        fastest = narrows.plan("cola-tiny", **REQUEST).prediction.step_time_s
        self.assertEqual(narrows.cost(model="cola-tiny", **REQUEST).prediction.step_time_s, fastest)
        explained = narrows.explain(model="cola-tiny", **REQUEST)
        self.assertEqual(explained.chosen.prediction.step_time_s, fastest)
        with self.assertRaisesRegex(narrows.InvalidInput, "--model"):
            narrows.cost()

    def test_steps_of_frameworks_are_priced(self) -> None:
        request = {"hardware": "a100-80gb-8", "devices": 16, "global_batch": 32, "tensor": 2}
        priced = narrows.cost(model="llama-1b", framework="nanotron", **request)
        self.assertIsInstance(priced, narrows.FrameworkCost)
        self.assertEqual((priced.framework, priced.step["mesh"]["data"]), ("nanotron", 8))
        low, high = priced.step_time_interval_s
        self.assertTrue(low < priced.step_time_s < high)
        self.assertEqual(priced.row()["tensor"], 2)
        self.assertEqual(priced.raw["prediction"]["mfu"], priced.mfu)

    def test_warnings_name_the_line_of_the_caller(self) -> None:
        # CoLA's classes ignore the field, which causes a warning.
        model = {
            "model_type": "cola", "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4,
            "intermediate_size": 172, "num_hidden_layers": 2, "lr_act_type": "linear",
        }
        request = {"devices": 1, "sequence_length": 128}
        for command in (
            lambda: narrows.plan(model, **request),
            lambda: narrows.cost(model=model, **request),
            lambda: narrows.whatif(model, sweep={"global_batch": [1]}, **request),
            lambda: narrows.sensitivity(model, **request),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                command()
            self.assertEqual([warning.filename for warning in caught], [__file__])

    def test_warnings_are_warnings(self) -> None:
        with self.assertWarnsRegex(narrows.NarrowsWarning, "has no effect on this plan"):
            narrows.plan("cola-tiny", zero="1", devices=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            narrows.plan("cola-tiny", devices=1)


class Distribution(unittest.TestCase):
    def test_the_wheel_has_its_licences_and_its_readme(self) -> None:
        distribution = importlib.metadata.distribution("narrows")
        names = {path.name for path in distribution.files or []}
        self.assertLessEqual({"LICENSE-APACHE", "LICENSE-MIT"}, names)
        self.assertIn("narrows.plan(", distribution.read_text("METADATA") or "")


class Threads(unittest.TestCase):
    LONG = {"devices": 512, "global_batch": 4096}

    def test_ctrl_c_stops_a_search(self) -> None:
        # A process that a shell starts in the background ignores the signal, and Python then has no handler of it.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, handler)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        begin = time.monotonic()
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            narrows.plan("cola-30b", **self.LONG)
        self.assertLess(time.monotonic() - begin, 30)

    def test_other_threads_run_during_a_search(self) -> None:
        counted = 0
        done = threading.Event()
        worker = threading.Thread(
            target=lambda: (narrows.plan("cola-7b", devices=8, global_batch=64), done.set())
        )
        worker.start()
        while not done.is_set() and counted < 1_000_000:
            counted += 1
            time.sleep(0.001)
        worker.join()
        self.assertGreater(counted, 5)


if __name__ == "__main__":
    unittest.main()
