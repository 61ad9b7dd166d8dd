"""The figures of benches/gpu.sh: what raw outputs say, as rows of a table. Plain Python, without packages.

    python3 benches/gpu_figures.py WHAT …      (WHAT is a function below; benches/gpu.sh calls them)

A row is a line on standard output: what was measured, the value, what it is held against, and whether it holds, apart by
tabs. The process ends with 1 where a row does not hold. Speeds have aims and no bounds: below one, the row says so.
"""

import argparse
import datetime
import hashlib
import json
import math
import pathlib
import random
import re
import socket
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benches" / "step"))

from sizes import SIZES  # noqa: E402

# Dense bf16, FLOP/s, by what a GPU is called, the more particular first: NVIDIA's data sheets, without sparsity.
PEAKS = [("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("GH200", 989e12), ("H200", 989e12), ("H100", 989e12), ("A100", 312e12)]

# How far a loss may be from another of the same step, relative. Sums in another order in f32: AdamW makes as large a
# step of a gradient that is nearly zero as of any other, so that curves part slowly. bf16 has 8 bits, 0.4 % a rounding.
CURVE_OFF = {"f32": 1e-2, "bf16": 2e-2}
# The same, of one program on several devices: few steps.
DEVICES_OFF = {"f32": 1e-4, "bf16": 2e-2}
# Of PyTorch in bf16, which keeps other things in bf16 than this runtime.
TORCH_OFF = 2e-2

# The aims.
FASTER_THAN_COMPILE = 1.2
MFU_AIM = 0.40

HOLDS, FAILS, ONLY_SAID = "yes", "NO", ""


class Rows:
    """What is printed."""

    def __init__(self):
        self.failed = False

    def add(self, what, value, beside="", holds=ONLY_SAID):
        if holds is True or holds is False:
            holds = HOLDS if holds else FAILS
        self.failed |= holds == FAILS
        print("\t".join([what, value, beside, holds]))

    def aim(self, what, value, reached, aim):
        self.add(what, value, f"aim: {aim}", "reached" if reached else "below")


def lines(path):
    """The steps of a metrics file."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def read(path):
    return json.loads(pathlib.Path(path).read_text())


def torch_steps(path):
    """(version, parameters, (seconds, loss) of each step) that torch_step.py said."""
    first, *steps = pathlib.Path(path).read_text().splitlines()
    parameters, version = first.split()
    return version, int(parameters), [(float(s.split()[0]), float(s.split()[2])) for s in steps]


def furthest(found, wanted):
    """The largest relative difference of two curves; infinite where one is no number, or they are not as long."""
    if len(found) != len(wanted) or not found:
        return math.inf
    off = [abs(one / other - 1) for one, other in zip(found, wanted)]
    return max(math.inf if math.isnan(x) else x for x in off)


def mfu(model, sequences, length, step_time_s, peak):
    """FLOPs of the model over what the GPU could do in a step."""
    return SIZES[model].flops_of_sequence(length) * sequences / (step_time_s * peak)


def work(text):
    model, sequences, length, steps = text.split(",")
    return model, int(sequences), int(length), int(steps)


def shown(text):
    model, sequences, length, steps = work(text)
    return f"{model}, {sequences} × {length}, {steps} steps"


def peak_of(name):
    return next((peak for part, peak in PEAKS if part in name), None)


# ---- what benches/gpu.sh asks besides rows


def why_no_gpu(args, _rows):
    """Why the GPU cannot be used, by what `narrows doctor` says; nothing where it can."""
    doctor = read(args.doctor)
    cuda = doctor["backends"]["cuda"]
    if not cuda["usable"]:
        first, *others = cuda["because"]
        print(f"no GPU can be used here: {first}" + " (`narrows doctor` says what else)" * bool(others))


def port(_args, _rows):
    """A port that is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        # The launch of processes listens here, and at no other.
        print(found.getsockname()[1])


def tokens(args, _rows):
    """A token file (docs/token-files.md) of so many ids, drawn from a model's vocabulary."""
    vocabulary = SIZES[args.model].vocabulary
    dice = random.Random(1)
    body = b"".join(dice.randrange(vocabulary).to_bytes(2, "little") for _ in range(args.count))
    header = b"NRWTOKEN"
    for number, size in ((1, 4), (2, 4), (vocabulary, 4), (0xFFFFFFFF, 4), (args.count, 8)):
        header += number.to_bytes(size, "little")
    header += hashlib.sha256(body).digest() + bytes(32) + b"drawn".ljust(96, b"\0") + bytes(32)
    pathlib.Path(args.output).write_bytes(header + hashlib.sha256(header).digest() + body)


def rates(args, _rows):
    """The learning rates of a run, one a line."""
    text = "".join(f"{line['learning_rate']!r}\n" for line in lines(args.metrics))
    pathlib.Path(args.output).write_text(text)


def flops(args, _rows):
    """FLOPs of one sequence, forward and backward, and the parameters."""
    sizes = SIZES[args.model]
    print(sizes.flops_of_sequence(args.length), sizes.parameters())


# ---- rows


def conformance(args, rows):
    said = pathlib.Path(args.output).read_text()
    passed = sum(int(count) for count in re.findall(r"test result: ok\. (\d+) passed", said))
    # Some are said once for each seed.
    skipped = list(dict.fromkeys(re.findall(r"skipped: (.*)", said)))
    rows.add("conformance suite", f"{passed} tests passed", f"{len(skipped)} skipped", passed > 0)
    for found in re.findall(r"(\d+ programs: .*)", said):
        rows.add("against the reference", found)
    for why in skipped:
        rows.add("skipped", why)


def curve(args, rows):
    cpu = [line["loss"] for line in lines(args.cpu)]
    for precision, path in (("f32", args.f32), ("bf16", args.bf16)):
        found = [line["loss"] for line in lines(path)]
        off, may = furthest(found, cpu), CURVE_OFF[precision]
        value = f"off by at most {off:.1e}; ends at {found[-1]:.4f}"
        beside = f"processors, f32: ends at {cpu[-1]:.4f}; at most {may:.0e}"
        rows.add(f"loss curve on the GPU, {precision}: {shown(args.work)}", value, beside, off <= may)


def calibrate(args, rows):
    profile = read(args.profile)
    points = len((profile.get("measured") or {}).get("points", []))
    rows.add("profile of this GPU", f"{points} measurements", f"calibrate/{pathlib.Path(args.profile).name}", points > 0)


def speed(args, rows):
    model, sequences, length, _ = work(args.work)
    steps = lines(args.narrows)
    losses = [line["loss"] for line in steps]
    took = statistics.median(line["step_time_s"] for line in steps[args.warm_up :])
    of_step = SIZES[model].flops_of_sequence(length) * sequences
    rows.add("work", f"{model}, {sequences} sequences of {length}", f"{of_step:.4e} model FLOPs a step")
    # What the program counts, from what it predicts: another count of the same.
    priced = read(args.cost)
    hardware = peak_of_profile(priced)
    if hardware:
        counted = priced["prediction"]["mfu"] * hardware * priced["prediction"]["step_time_s"]
        rows.add("FLOPs as `narrows cost` counts them", f"{counted:.4e}", "the same to 1e-6", abs(counted / of_step - 1) < 1e-6)
    peak = float(args.peak) if args.peak else peak_of(gpu_name(args.narrows))

    def said(name, step_time_s):
        value = f"{sequences * length / step_time_s:,.0f} tokens/s, {1e3 * step_time_s:.2f} ms a step"
        rows.add(name, value, f"MFU {mfu(model, sequences, length, step_time_s, peak):.1%}" if peak else "MFU unknown")

    said("narrows, captured graphs", took)
    if peak:
        share = mfu(model, sequences, length, took, peak)
        rows.aim("MFU of narrows", f"{share:.1%}", share >= MFU_AIM, f"{MFU_AIM:.0%} of {peak / 1e12:.0f} TFLOP/s")
    else:
        rows.add("MFU of narrows", "unknown", "no peak is known of this GPU: --peak-flops")
    if not args.beside:
        rows.add("PyTorch", "left out", "this Python has no torch: --python")
    for entry in args.beside:
        mode, _, path = entry.partition("=")
        if not path:
            rows.add(f"PyTorch {mode}", "did not run", f"torch-{mode}.err says why", FAILS)
            continue
        version, parameters, other = torch_steps(path)
        other_took = statistics.median(seconds for seconds, _ in other[args.warm_up :])
        said(f"PyTorch {version} {mode}", other_took)
        ratio = other_took / took
        if mode == "compile":
            rows.aim("narrows over PyTorch compile", f"{ratio:.2f}×", ratio >= FASTER_THAN_COMPILE, f"{FASTER_THAN_COMPILE}×")
        else:
            rows.add(f"narrows over PyTorch {mode}", f"{ratio:.2f}×")
        off = furthest([loss for _, loss in other], losses)
        same = off <= TORCH_OFF and parameters == SIZES[model].parameters()
        rows.add(f"losses of PyTorch {mode}", f"off by at most {off:.1e}", f"at most {TORCH_OFF:.0e}", same)


def gpu_name(beside):
    """What the GPU is called, by the folder in which a part left a file."""
    doctor = pathlib.Path(beside).parent.parent / "machine" / "doctor.json"
    devices = read(doctor)["devices"] if doctor.exists() else []
    return devices[0]["name"] if devices else ""


def peak_of_profile(priced):
    """FLOP/s that a prediction's MFU is of, where the profile is one that comes with the program."""
    profile = pathlib.Path(__file__).parent.parent / "profiles" / f"{priced['decisions']['hardware']['name']}.json"
    if not profile.exists():
        return None
    profile = read(profile)
    compute = {"mixed-bf16": "bf16"}.get(profile["precision"], "f32")
    return profile["device"]["peak_flops_per_s"][compute]


def predict(args, rows):
    took = statistics.median(line["step_time_s"] for line in lines(args.narrows)[args.warm_up :])
    for entry in args.predictions:
        name, _, path = entry.partition("=")
        prediction = read(path)["prediction"]
        low, high = prediction["step_time_interval_s"]
        expected = prediction["step_time_s"]
        value = f"{1e3 * expected:.2f} ms, in 90 % of cases {1e3 * low:.2f} to {1e3 * high:.2f}"
        within = "within" if low <= took <= high else "outside"
        beside = f"measured {1e3 * took:.2f} ms: {within}, predicted : measured = {expected / took:.3f}"
        rows.add(f"predicted step ({name})", value, beside)


def btp(args, rows):
    alone, together = ([line["loss"] for line in lines(path)] for path in (args.alone, args.together))
    off, may = furthest(together, alone), DEVICES_OFF[args.precision]
    moved = [sum(sum(axes.values()) for axes in device.values()) for device in lines(args.together)[-1]["collective_bytes"]]
    what = f"BTP over NCCL, {args.count} processes, {args.precision}: {shown(args.work)}"
    # Without collectives nothing was split.
    rows.add(what, f"losses off by at most {off:.1e}", f"one process; at most {may:.0e}", off <= may and min(moved) > 0)


def sanitize(args, rows):
    said = pathlib.Path(args.output).read_text()
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
    clean = args.code == 0 and bool(summaries) and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    value = summaries[-1] if summaries else f"no summary, and exit code {args.code}"
    rows.add(f"compute-sanitizer {args.tool}: {shown(args.work)}", value, "none", clean)


def trace(args, rows):
    answer = read(args.eager)
    measured, expected = answer["breakdown_s"], answer["prediction"]["breakdown_s"]
    whole = sum(measured.values())
    rows.add(f"a step of single launches: {shown(args.work)}", f"{1e3 * answer['step_time_s']:.2f} ms", "median")
    for part, seconds in sorted(measured.items(), key=lambda part: -part[1]):
        if seconds > 0:
            value = f"{1e3 * seconds:.3f} ms ({seconds / whole:.1%})"
            rows.add(f"spent on {part}", value, f"predicted {1e3 * expected.get(part, 0.0):.3f} ms")
    # Of the traced step, by instruction and pass over the model: what is worth a look first.
    times = {}
    for event in read(args.trace)["traceEvents"]:
        about = event.get("args", {})
        # Devices that were measured come first; stages that were predicted are numbered from a million.
        if event["ph"] == "X" and "instruction" in about and event["pid"] < 1_000_000:
            key = (about["op"], about["phase"], about["instruction"])
            times[key] = times.get(key, 0.0) + event["dur"]
    for (op, phase, instruction), micros in sorted(times.items(), key=lambda entry: -entry[1])[:8]:
        rows.add(f"longest: {op}, {phase}", f"{micros / 1e3:.3f} ms", instruction)


# ---- the table


def table(args, _rows):
    """Markdown: what it was measured on, a row for everything, and the commands."""
    out = pathlib.Path(args.folder)
    machine = {name: (out / "machine" / name).read_text().strip() for name in ("commit", "torch", "asked", "nvidia-smi")}
    doctor = read(out / "machine" / "doctor.json")
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB, sm_{gpu['compute_capability'].replace('.', '')})" for gpu in doctor["devices"]]
    driver = re.search(r"Driver Version: *([\d.]+)", machine["nvidia-smi"])
    libraries = [f"{found['name']} {found['version']}" for found in doctor["libraries"] if found["version"]]
    day = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"## On a GPU, {day}\n")
    print(f"- GPU: {', '.join(gpus) or 'none'}")
    print(f"- driver: {driver.group(1) if driver else 'unknown'}; CUDA {doctor['driver_version'] or 'none'}")
    print(f"- libraries: {', '.join(libraries) or 'none'}; torch {machine['torch']}")
    print(f"- processor: {doctor['machine']['title']}")
    print(f"- narrows {doctor['version']}, commit {machine['commit']}")
    print(f"- command: `{machine['asked'].strip()}`\n")
    print("| part | what | measured | held against | holds |")
    print("|---|---|---|---|---|")
    for part in args.parts:
        state = (out / part / "state").read_text().strip()
        found = out / part / "rows.tsv"
        for row in found.read_text().splitlines() if found.exists() else []:
            print(f"| {part} | " + " | ".join(cell.replace("|", "\\|") for cell in row.split("\t")) + " |")
        if state != "done":
            verdict = FAILS if state.startswith("failed") else ONLY_SAID
            print(f"| {part} | {state.replace('|', ' ')} | | | {verdict} |")
    commands = [(out / part / "commands") for part in args.parts]
    text = "".join(path.read_text() for path in commands if path.exists())
    if text:
        # Where outputs went is nobody's business but this machine's.
        print("\n```sh\n" + text.replace(str(out), "OUT") + "```")


WHAT = {
    "why-no-gpu": (why_no_gpu, ["doctor"]),
    "port": (port, []),
    "tokens": (tokens, ["--model", "--count:int", "output"]),
    "rates": (rates, ["metrics", "output"]),
    "flops": (flops, ["model", "length:int"]),
    "conformance": (conformance, ["output"]),
    "curve": (curve, ["work", "cpu", "f32", "bf16"]),
    "calibrate": (calibrate, ["profile"]),
    "speed": (speed, ["work", "--warm-up:int", "--peak", "--cost", "narrows", "beside*"]),
    "predict": (predict, ["--warm-up:int", "narrows", "predictions*"]),
    "btp": (btp, ["work", "precision", "count:int", "alone", "together"]),
    "sanitize": (sanitize, ["work", "tool", "code:int", "output"]),
    "trace": (trace, ["work", "eager", "trace"]),
    "table": (table, ["folder", "parts*"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    for name, (function, arguments) in WHAT.items():
        one = what.add_parser(name, help=function.__doc__)
        one.set_defaults(function=function)
        for argument in arguments:
            argument, _, kind = argument.partition(":")
            many = {"nargs": "*"} if argument.endswith("*") else {}
            needed = {"required": True} if argument.startswith("--") else {}
            one.add_argument(argument.rstrip("*"), type=int if kind else str, **many, **needed)
    args, rows = parser.parse_args(), Rows()
    args.function(args, rows)
    sys.exit(1 if rows.failed else 0)


main()
