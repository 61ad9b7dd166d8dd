#!/usr/bin/env python3
"""Compares the answers of two builds of `narrows` on a list of requests.

    tests/equivalence/compare.py OLD NEW [--requests FILE] [--only SUBSTRING] [--allow PATTERN]...

Runs every request with both binaries, each in a scratch folder of its own, and compares the exit
code, the JSON answer, the plan files, the metrics and the hashes of checkpoint tensors to the last
digit. Wall-clock measurements are left out; nothing else is. Error messages are compared by exit
code alone, since their wording may change. Exits with 1 if any answer differs.
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

# Wall-clock measurements, and text that says how long something took.
MEASURED = {"wall_time_s", "data_time_s", "duration_s"}
# Measured where a run reports them, predicted under `prediction`.
MEASURED_BY_RUNS = MEASURED | {"step_time_s", "tokens_per_s", "breakdown_s"}


def without(value, keys):
    """The JSON value without some keys; what stands under `prediction` keeps all but MEASURED."""
    if isinstance(value, dict):
        inner = {key: MEASURED if key == "prediction" else keys for key in value}
        return {k: without(v, inner[k]) for k, v in value.items() if k not in keys}
    if isinstance(value, list):
        return [without(item, keys) for item in value]
    return value


def answer(binary, line, folder):
    """What a binary answers to a request: exit code, JSON, and the files it wrote."""
    arguments = shlex.split(line.replace("{dir}", str(folder)))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    ended = subprocess.run([binary, *arguments, "--format", "json"], cwd=ROOT, capture_output=True,
                           text=True, stdin=subprocess.DEVNULL)
    keys = MEASURED_BY_RUNS if arguments[0] == "run" else MEASURED
    found = {"exit": ended.returncode}
    if ended.stdout.strip():
        text = ended.stdout.replace(str(folder), "{dir}")
        found["json"] = without(json.loads(text), keys)
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or before.get(path) == path.stat().st_mtime_ns:
            continue
        name = str(path.relative_to(folder))
        if name.endswith(".safetensors"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif name.endswith(".jsonl"):
            rows = path.read_text().splitlines()
            found[name] = [without(json.loads(row), keys) for row in rows]
        elif name.endswith(".json") and "step-" not in name:
            found[name] = without(json.loads(path.read_text()), keys)
    return found


def differences(old, new, path=""):
    """The places where two JSON values differ, as (path, old, new)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new)):
            yield from differences(one, other, f"{path}[{index}]")
    elif old != new:
        yield path, old, new


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--requests", default=HERE / "requests.txt", type=pathlib.Path)
    parser.add_argument("--only", default="", help="run the lines that hold this text")
    parser.add_argument("--allow", action="append", default=[],
                        help="a regular expression of JSON paths that may differ")
    options = parser.parse_args()
    lines = [line.strip() for line in options.requests.read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#") and options.only in line]
    allowed = [re.compile(pattern) for pattern in options.allow]
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = [pathlib.Path(scratch) / name for name in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        for line in lines:
            binaries = (pathlib.Path(options.old).resolve(), pathlib.Path(options.new).resolve())
            old, new = (answer(*pair) for pair in zip(binaries, (line, line), folders))
            found = [row for row in differences(old, new)
                     if not any(pattern.search(row[0]) for pattern in allowed)]
            differing += bool(found)
            print("equal " if not found else "DIFFER", f"exit {new['exit']}", line, flush=True)
            for path, one, other in found[:8]:
                print(f"    {path}: {str(one)[:100]} -> {str(other)[:100]}")
    print(f"{len(lines) - differing} of {len(lines)} requests have equal answers")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
