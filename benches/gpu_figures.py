"""Figures of benches/gpu.sh: turns raw outputs into rows of a table. Plain Python, without packages.

    python3 benches/gpu_figures.py COMMAND …      (commands are at the end; benches/gpu.sh calls them)

A row is a line on standard output with tab-separated cells: quantity, measured value, reference, verdict. The process
exits with 1 if a check fails. Speeds have targets, not bounds: a value below its target is reported, but does not fail.
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

# Dense bf16 FLOP/s by a part of the GPU's name, the more specific first: NVIDIA's data sheets, without sparsity.
PEAK_FLOPS = [("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("GH200", 989e12), ("H200", 989e12), ("H100", 989e12), ("A100", 312e12)]

# Tolerances: largest relative difference between two losses of the same step. In f32 the order of sums differs, and
# AdamW makes as large a step for a gradient near zero as for any other, so curves diverge slowly. A bf16 value has 8
# significant bits: 0.4 % for each rounding.
CURVE_TOLERANCE = {"f32": 1e-2, "bf16": 2e-2}
# The same model on several devices, for few steps.
DEVICES_TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}
# PyTorch in bf16, which rounds other values to bf16 than this runtime does.
TORCH_TOLERANCE = 2e-2

# The exit code of compute-sanitizer when it reports errors, as gpu.sh sets it.
FOUND_ERRORS = 9

# Instructions whose times are listed, the longest first.
KERNELS_MAX = 40

SPEEDUP_OVER_COMPILE_TARGET = 1.2
MFU_TARGET = 0.40

PASS, FAIL, INFO = "pass", "FAIL", ""


class Rows:
    """Prints rows and remembers whether a check failed."""

    def __init__(self):
        self.failed = False

    def add(self, quantity, value, reference="", verdict=INFO):
        self.failed |= verdict == FAIL
        print("\t".join([quantity, value, reference, verdict]))

    def check(self, quantity, value, reference, passed):
        self.add(quantity, value, reference, PASS if passed else FAIL)

    def target(self, quantity, value, target, reached):
        self.add(quantity, value, f"target: {target}", "reached" if reached else "below")


def read_metrics(path):
    """The steps of a metrics file."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def read_losses(path):
    return [step["loss"] for step in read_metrics(path)]


def read_json(path):
    return json.loads(pathlib.Path(path).read_text())


def read_torch_steps(path):
    """Version, number of parameters, and (seconds, loss) of each step, from the output of torch_step.py."""
    first, *steps = pathlib.Path(path).read_text().splitlines()
    parameters, version = first.split()
    return version, int(parameters), [(float(s.split()[0]), float(s.split()[2])) for s in steps]


def largest_difference(losses, expected):
    """The largest relative difference between two loss curves; infinite with a NaN or different lengths."""
    if len(losses) != len(expected) or not losses:
        return math.inf
    differences = [abs(loss / other - 1) for loss, other in zip(losses, expected)]
    return max(math.inf if math.isnan(x) else x for x in differences)


def mfu(model, sequences, length, step_time_s, peak_flops):
    """Model FLOPs utilisation: FLOPs of a step over those that the GPU could do in its time."""
    return SIZES[model].flops_of_sequence(length) * sequences / (step_time_s * peak_flops)


def parse_workload(text):
    """Model, sequences, length and steps of MODEL,SEQUENCES,LENGTH,STEPS."""
    model, sequences, length, steps = text.split(",")
    return model, int(sequences), int(length), int(steps)


def describe_workload(text):
    model, sequences, length, steps = parse_workload(text)
    return f"{model}, {sequences} × {length}, {steps} steps"


def peak_flops_by_name(gpu):
    return next((peak for name, peak in PEAK_FLOPS if name in gpu), None)


# ---- Commands that print no rows


def why_no_gpu(args, _rows):
    """Prints why the GPU cannot be used, from the answer of `narrows doctor`; nothing if it can."""
    cuda = read_json(args.doctor)["backends"]["cuda"]
    if not cuda["usable"]:
        first, *others = cuda["because"]
        print(f"no usable GPU: {first}" + " (`narrows doctor` lists all reasons)" * bool(others))


def port(_args, _rows):
    """Prints a free port, for the rendezvous of a launch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        print(probe.getsockname()[1])


def tokens(args, _rows):
    """Writes a token file (docs/token-files.md) of random ids from a model's vocabulary."""
    vocabulary = SIZES[args.model].vocabulary
    generator = random.Random(1)
    body = b"".join(generator.randrange(vocabulary).to_bytes(2, "little") for _ in range(args.count))
    header = b"NRWTOKEN"
    for field, size in ((1, 4), (2, 4), (vocabulary, 4), (0xFFFFFFFF, 4), (args.count, 8)):
        header += field.to_bytes(size, "little")
    header += hashlib.sha256(body).digest() + bytes(32) + b"drawn".ljust(96, b"\0") + bytes(32)
    pathlib.Path(args.output).write_bytes(header + hashlib.sha256(header).digest() + body)


def rates(args, _rows):
    """Writes the learning rates of a run, one a line."""
    text = "".join(f"{step['learning_rate']!r}\n" for step in read_metrics(args.metrics))
    pathlib.Path(args.output).write_text(text)


def flops(args, _rows):
    """Prints the FLOPs of one sequence, forward and backward, and the number of parameters."""
    sizes = SIZES[args.model]
    print(sizes.flops_of_sequence(args.length), sizes.parameters())


# ---- Commands that print rows


def conformance(args, rows):
    output = pathlib.Path(args.output).read_text()
    passed = sum(int(count) for count in re.findall(r"test result: ok\. (\d+) passed", output))
    # Some tests report the same skip once per seed.
    skipped = list(dict.fromkeys(re.findall(r"skipped: (.*)", output)))
    rows.check("conformance suite", f"{passed} tests passed", f"{len(skipped)} skipped", passed > 0)
    for summary in re.findall(r"(\d+ programs: .*)", output):
        rows.add("compared with the reference", summary)
    for summary in re.findall(r"long sequences: (.*)", output):
        rows.add("gradients compared with the CPU", summary)
    for reason in skipped:
        rows.add("skipped", reason)


def curve(args, rows):
    cpu = read_losses(args.cpu)
    for precision, path in (("f32", args.f32), ("bf16", args.bf16)):
        losses = read_losses(path)
        difference, tolerance = largest_difference(losses, cpu), CURVE_TOLERANCE[precision]
        quantity = f"loss curve on the GPU, {precision}: {describe_workload(args.workload)}"
        value = f"differs by at most {difference:.1e}; final loss {losses[-1]:.4f}"
        reference = f"CPU, f32: final loss {cpu[-1]:.4f}; tolerance {tolerance:.0e}"
        rows.check(quantity, value, reference, difference <= tolerance)


def calibrate(args, rows):
    points = len((read_json(args.profile).get("measured") or {}).get("points", []))
    file = f"calibrate/{pathlib.Path(args.profile).name}"
    rows.check("profile of this GPU", f"{points} measurements", file, points > 0)


def speed(args, rows):
    model, sequences, length, _ = parse_workload(args.workload)
    steps = read_metrics(args.narrows)
    step_time_s = statistics.median(step["step_time_s"] for step in steps[args.warm_up :])
    step_flops = SIZES[model].flops_of_sequence(length) * sequences
    rows.add("workload", f"{model}, {sequences} sequences of {length}", f"{step_flops:.4e} model FLOPs a step")
    # The FLOPs that the program counts, recovered from its prediction: an independent count.
    cost = read_json(args.cost)
    profile_peak = profile_peak_flops(cost)
    if profile_peak:
        counted = cost["prediction"]["mfu"] * profile_peak * cost["prediction"]["step_time_s"]
        same = abs(counted / step_flops - 1) < 1e-6
        rows.check("FLOPs as `narrows cost` counts them", f"{counted:.4e}", "equal to 1e-6", same)
    peak_flops = peak_of(args, args.narrows)
    add_speed(rows, "narrows, captured graphs", args.workload, step_time_s, peak_flops)
    if peak_flops:
        utilisation = mfu(model, sequences, length, step_time_s, peak_flops)
        target = f"{MFU_TARGET:.0%} of {peak_flops / 1e12:.0f} TFLOP/s"
        rows.target("MFU of narrows", f"{utilisation:.1%}", target, utilisation >= MFU_TARGET)
    else:
        rows.add("MFU of narrows", "unknown", "the peak of this GPU is not known: pass --peak-flops")


def peak_of(args, file):
    """Peak FLOP/s of --peak-flops, or of the GPU's name; None if unknown."""
    return float(args.peak_flops) if args.peak_flops else peak_flops_by_name(gpu_name(file))


def add_speed(rows, name, workload, step_time_s, peak_flops):
    model, sequences, length, _ = parse_workload(workload)
    value = f"{sequences * length / step_time_s:,.0f} tokens/s, {1e3 * step_time_s:.2f} ms a step"
    utilisation = f"MFU {mfu(model, sequences, length, step_time_s, peak_flops):.1%}" if peak_flops else "MFU unknown"
    rows.add(name, value, utilisation)


def microbatch(args, rows):
    step_time_s = statistics.median(step["step_time_s"] for step in read_metrics(args.metrics)[args.warm_up :])
    add_speed(rows, f"narrows, microbatch of {args.size}", args.workload, step_time_s, peak_of(args, args.metrics))


def torch(args, rows):
    """The steps of PyTorch in one mode, beside those of narrows."""
    mode, model = args.mode, parse_workload(args.workload)[0]
    steps = read_metrics(args.narrows)
    try:
        version, parameters, torch_steps = read_torch_steps(args.output)
        torch_step_time_s = statistics.median(seconds for seconds, _ in torch_steps[args.warm_up :])
    except (OSError, ValueError):
        rows.add(f"PyTorch {mode}", "failed", f"torch-{mode}.err has the error", FAIL)
        return
    add_speed(rows, f"PyTorch {version} {mode}", args.workload, torch_step_time_s, peak_of(args, args.narrows))
    speedup = torch_step_time_s / statistics.median(step["step_time_s"] for step in steps[args.warm_up :])
    if mode.startswith("compile"):
        target, reached = f"{SPEEDUP_OVER_COMPILE_TARGET}×", speedup >= SPEEDUP_OVER_COMPILE_TARGET
        rows.target(f"narrows over PyTorch {mode}", f"{speedup:.2f}×", target, reached)
    else:
        rows.add(f"narrows over PyTorch {mode}", f"{speedup:.2f}×")
    difference = largest_difference([loss for _, loss in torch_steps], [step["loss"] for step in steps])
    same = difference <= TORCH_TOLERANCE and parameters == SIZES[model].parameters()
    value = f"differ by at most {difference:.1e}"
    rows.check(f"losses of PyTorch {mode}", value, f"tolerance {TORCH_TOLERANCE:.0e}", same)


def gpu_name(metrics):
    """The name of the GPU, from the answer of `narrows doctor` beside a part's folder."""
    doctor = pathlib.Path(metrics).parent.parent / "machine" / "doctor.json"
    devices = read_json(doctor)["devices"] if doctor.exists() else []
    return devices[0]["name"] if devices else ""


def profile_peak_flops(cost):
    """Peak FLOP/s that a prediction's MFU refers to; None if its profile is not one of the presets."""
    name = cost["decisions"]["hardware"]["name"]
    file = pathlib.Path(__file__).parent.parent / "profiles" / f"{name}.json"
    if not file.exists():
        return None
    profile = read_json(file)
    compute = {"mixed-bf16": "bf16"}.get(profile["precision"], "f32")
    return profile["device"]["peak_flops_per_s"][compute]


def predict(args, rows):
    steps = read_metrics(args.narrows)[args.warm_up :]
    measured = statistics.median(step["step_time_s"] for step in steps)
    for entry in args.predictions:
        name, _, path = entry.partition("=")
        prediction = read_json(path)["prediction"]
        low, high = prediction["step_time_interval_s"]
        predicted = prediction["step_time_s"]
        value = f"{1e3 * predicted:.2f} ms, 90 % interval {1e3 * low:.2f} to {1e3 * high:.2f}"
        within = "within" if low <= measured <= high else "outside"
        reference = f"measured {1e3 * measured:.2f} ms: {within}, predicted / measured = {predicted / measured:.3f}"
        rows.add(f"predicted step ({name})", value, reference)


def btp(args, rows):
    difference = largest_difference(read_losses(args.many), read_losses(args.one))
    tolerance = DEVICES_TOLERANCE[args.precision]
    last_step = read_metrics(args.many)[-1]
    moved = [sum(sum(axes.values()) for axes in device.values()) for device in last_step["collective_bytes"]]
    quantity = f"BTP over NCCL, {args.processes} processes, {args.precision}: {describe_workload(args.workload)}"
    # A run without collectives has not sharded anything.
    passed = difference <= tolerance and min(moved) > 0
    rows.check(quantity, f"losses differ by at most {difference:.1e}", f"one process; tolerance {tolerance:.0e}", passed)


def sanitize(args, rows):
    output = pathlib.Path(args.output).read_text()
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    # Barriers in shared memory that asynchronous copies complete are reported as races in cuBLASLt's kernels for Hopper.
    accesses = re.findall(r"(?:Read|Write) access at ([^\s+]+)", output)
    races, all_reports = len(re.findall(r"Race reported between", output)), re.findall(r"RACECHECK SUMMARY: (\d+) ", output)
    only_cublas = (
        args.exit_code == FOUND_ERRORS
        and all_reports == [str(races)]
        and bool(accesses)
        and all(kernel.startswith("nvjet_") for kernel in accesses)
    )
    found_nothing = args.exit_code == 0 and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    clean = bool(summaries) and (found_nothing or only_cublas)
    value = summaries[-1] if summaries else f"no summary, exit code {args.exit_code}"
    if only_cublas:
        value += ", all in cuBLASLt's own kernels (nvjet_…)"
    rows.check(f"compute-sanitizer {args.tool}: {describe_workload(args.workload)}", value, "no errors", clean)


def trace(args, rows):
    answer = read_json(args.eager)
    measured, predicted = answer["breakdown_s"], answer["prediction"]["breakdown_s"]
    total = sum(measured.values())
    rows.add(f"eager step: {describe_workload(args.workload)}", f"{1e3 * answer['step_time_s']:.2f} ms", "median")
    for category, seconds in sorted(measured.items(), key=lambda item: -item[1]):
        if seconds > 0:
            value = f"{1e3 * seconds:.3f} ms ({seconds / total:.1%})"
            rows.add(f"time in {category}", value, f"predicted {1e3 * predicted.get(category, 0.0):.3f} ms")
    # Microseconds of each instruction in the traced step by op, phase and kernel: measured and predicted, with its work.
    instructions = {}
    for event in read_json(args.trace)["traceEvents"]:
        details = event.get("args", {})
        if event["ph"] == "X" and "instruction" in details:
            key = (details["op"], details["phase"], details["instruction"], details.get("kernel", ""))
            entry = instructions.setdefault(key, {"measured": 0.0, "predicted": 0.0, "flops": 0, "bytes": 0})
            # Measured devices are numbered from 0, predicted stages from a million.
            is_measured = event["pid"] < 1_000_000
            entry["measured" if is_measured else "predicted"] += event["dur"]
            for work in ("flops", "bytes"):
                entry[work] += details.get(work, 0) if is_measured else 0
    peak_flops = peak_of(args, args.eager)
    for (op, phase, instruction, kernel), entry in sorted(instructions.items(), key=lambda item: -item[1]["measured"])[:KERNELS_MAX]:
        micros = entry["measured"]
        if not micros:
            continue
        rate = f"{entry['bytes'] / micros / 1e3:,.0f} GB/s"
        if entry["flops"]:
            rate = f"{entry['flops'] / micros / 1e6:,.1f} TFLOP/s"
            rate += f", {entry['flops'] / micros * 1e6 / peak_flops:.0%} of the peak" if peak_flops else ""
        value = f"{micros / 1e3:.3f} ms, {rate}"
        predicted = f"predicted {entry['predicted'] / 1e3:.3f} ms"
        rows.add(f"{op}, {phase}: {kernel or instruction}", value, predicted)


# ---- The table


def describe_clocks(path):
    """Medians of the samples of nvidia-smi: clocks in MHz, power in W and temperature in °C; empty without samples."""
    lines = path.read_text().splitlines() if path.exists() else []
    samples = []
    for line in lines:
        try:
            samples.append([float(cell) for cell in line.split(",")])
        except ValueError:
            continue
    if not samples:
        return ""
    multiprocessors, memory, power, temperature = (statistics.median(column) for column in zip(*samples))
    return f"{multiprocessors:.0f} MHz, memory {memory:.0f} MHz, {power:.0f} W, {temperature:.0f} °C"


def table(args, _rows):
    """Prints Markdown: the machine, all rows, and the commands."""
    out = pathlib.Path(args.folder)
    machine = {name: (out / "machine" / name).read_text().strip() for name in ("commit", "torch", "command", "nvidia-smi")}
    doctor = read_json(out / "machine" / "doctor.json")
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB, sm_{gpu['compute_capability'].replace('.', '')})" for gpu in doctor["devices"]]
    driver = re.search(r"Driver Version: *([\d.]+)", machine["nvidia-smi"])
    libraries = [f"{library['name']} {library['version']}" for library in doctor["libraries"] if library["version"]]
    day = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"## On a GPU, {day}\n")
    print(f"- GPU: {', '.join(gpus) or 'none'}")
    print(f"- driver: {driver.group(1) if driver else 'unknown'}; CUDA {doctor['driver_version'] or 'none'}")
    print(f"- libraries: {', '.join(libraries) or 'none'}; torch {machine['torch']}")
    print(f"- processor: {doctor['machine']['title']}")
    print(f"- narrows {doctor['version']}, commit {machine['commit']}")
    print(f"- command: `{machine['command'].strip()}`\n")
    print("| part | quantity | measured | reference | verdict |")
    print("|---|---|---|---|---|")
    for part in args.parts:
        state = (out / part / "state").read_text().strip()
        rows = out / part / "rows.tsv"
        for row in rows.read_text().splitlines() if rows.exists() else []:
            print(f"| {part} | " + " | ".join(cell.replace("|", "\\|") for cell in row.split("\t")) + " |")
        clocks = describe_clocks(out / part / "clocks")
        if clocks:
            print(f"| {part} | clocks and power, medians while it ran | {clocks} | | |")
        if state != "done":
            verdict = FAIL if state.startswith("failed") else INFO
            print(f"| {part} | {state.replace('|', ' ')} | | | {verdict} |")
    commands = [(out / part / "commands") for part in args.parts]
    text = "".join(path.read_text() for path in commands if path.exists())
    if text:
        # The output folder is specific to this machine.
        print("\n```sh\n" + text.replace(str(out), "OUT") + "```")


# Name: function and arguments. `:int` converts an argument, `*` takes any number of them.
COMMANDS = {
    "why-no-gpu": (why_no_gpu, ["doctor"]),
    "port": (port, []),
    "tokens": (tokens, ["--model", "--count:int", "output"]),
    "rates": (rates, ["metrics", "output"]),
    "flops": (flops, ["model", "length:int"]),
    "conformance": (conformance, ["output"]),
    "curve": (curve, ["workload", "cpu", "f32", "bf16"]),
    "calibrate": (calibrate, ["profile"]),
    "speed": (speed, ["workload", "--warm-up:int", "--peak-flops", "--cost", "narrows"]),
    "microbatch": (microbatch, ["workload", "--warm-up:int", "--peak-flops", "size", "metrics"]),
    "torch": (torch, ["workload", "--warm-up:int", "--peak-flops", "narrows", "mode", "output"]),
    "predict": (predict, ["--warm-up:int", "narrows", "predictions*"]),
    "btp": (btp, ["workload", "precision", "processes:int", "one", "many"]),
    "sanitize": (sanitize, ["workload", "tool", "exit_code:int", "output"]),
    "trace": (trace, ["workload", "--peak-flops", "eager", "trace"]),
    "table": (table, ["folder", "parts*"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, (function, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.set_defaults(function=function)
        for argument in arguments:
            argument, _, kind = argument.partition(":")
            many = {"nargs": "*"} if argument.endswith("*") else {}
            required = {"required": True} if argument.startswith("--") else {}
            command.add_argument(argument.rstrip("*"), type=int if kind else str, **many, **required)
    args, rows = parser.parse_args(), Rows()
    args.function(args, rows)
    sys.exit(1 if rows.failed else 0)


main()
