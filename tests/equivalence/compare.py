#!/usr/bin/env python3
"""Compares the answers of two builds of `narrows` on a list of requests.

    tests/equivalence/compare.py OLD NEW [--requests FILE] [--only SUBSTRING] [--allow PATTERN]...

Runs every request with both binaries, each in a scratch folder of its own, and compares the exit
code, the JSON answer, the plan files, the metrics and the hashes of checkpoint tensors to the last
digit. Values that differ between two runs of one binary are left out (see below). Error messages
are compared by exit code alone, since their wording may change. Exits with 1 if any answer differs.
"""

import argparse
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Wall-clock measurements.
MEASURED = {"wall_time_s", "data_time_s", "duration_s"}
# Counts of work that depend on thread timing: two threads that race for the same segment or context
# both solve it, and both solves are counted. The same binary gives different counts from run to run.
RACY_COUNTS = {"candidates_priced", "segment_solves"}
IGNORED = MEASURED | RACY_COUNTS
# Further keys that a run measures. Under `prediction` the same keys are predicted, and compared.
IGNORED_IN_RUNS = IGNORED | {"step_time_s", "tokens_per_s", "breakdown_s"}


def without(value, ignored):
    """A JSON value without the ignored keys; below `prediction` only IGNORED is left out."""
    if isinstance(value, dict):
        inner = {key: IGNORED if key == "prediction" else ignored for key in value}
        return {k: without(v, inner[k]) for k, v in value.items() if k not in ignored}
    if isinstance(value, list):
        return [without(item, ignored) for item in value]
    return value


def answer(binary, request, folder):
    """The answer of a binary to a request: exit code, JSON, and the files that it wrote."""
    arguments = shlex.split(request.replace("{dir}", str(folder)))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    process = subprocess.run([binary, *arguments, "--format", "json"], cwd=ROOT, capture_output=True,
                             text=True, stdin=subprocess.DEVNULL)
    ignored = IGNORED_IN_RUNS if arguments[0] == "run" else IGNORED
    result = {"exit": process.returncode}
    if process.stdout.strip():
        text = process.stdout.replace(str(folder), "{dir}")
        result["json"] = without(json.loads(text), ignored)
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or before.get(path) == path.stat().st_mtime_ns:
            continue
        name = str(path.relative_to(folder))
        if name.endswith(".safetensors"):
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif name.endswith(".jsonl"):
            rows = path.read_text().splitlines()
            result[name] = [without(json.loads(row), ignored) for row in rows]
        elif name.endswith(".json") and "step-" not in name:
            result[name] = without(json.loads(path.read_text()), ignored)
    return result


def differences(old, new, path=""):
    """Yields (path, old value, new value) for every place where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new)):
            yield from differences(old_item, new_item, f"{path}[{index}]")
    elif old != new:
        yield path, old, new


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="the binary whose answers are expected")
    parser.add_argument("new", help="the binary under test")
    parser.add_argument("--requests", default=HERE / "requests.txt", type=pathlib.Path,
                        help="a file with one request a line [default: requests.txt beside this script]")
    parser.add_argument("--only", default="", help="run only requests that contain this text")
    parser.add_argument("--allow", action="append", default=[],
                        help="a regular expression of JSON paths that may differ")
    options = parser.parse_args()
    requests = [line.strip() for line in options.requests.read_text().splitlines()]
    requests = [line for line in requests if line and not line.startswith("#") and options.only in line]
    allowed = [re.compile(pattern) for pattern in options.allow]
    binaries = [pathlib.Path(path).resolve() for path in (options.old, options.new)]
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = [pathlib.Path(scratch) / name for name in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        for request in requests:
            old, new = (answer(binary, request, folder) for binary, folder in zip(binaries, folders))
            found = [difference for difference in differences(old, new)
                     if not any(pattern.search(difference[0]) for pattern in allowed)]
            differing += bool(found)
            print("equal " if not found else "DIFFER", f"exit {new['exit']}", request, flush=True)
            for path, old_value, new_value in found[:8]:
                print(f"    {path}: {str(old_value)[:100]} -> {str(new_value)[:100]}")
    print(f"{len(requests) - differing} of {len(requests)} requests have equal answers")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
