#!/usr/bin/env bash
# Runs what needs a GPU, part after part in the order of worth, and keeps one table of the results.
#
#     benches/gpu.sh                              # all parts, into bench-gpu-DATE/table.md and bench-gpu-DATE.tar.gz
#     benches/gpu.sh speed                        # one part; with --output DIR the table keeps the others' results in DIR
#     benches/gpu.sh --python VENV/bin/python     # compares with the PyTorch of that environment
#
# | part      | contents |
# |-----------|----------|
# | speed     | tokens a second, MFU and the predicted step, beside PyTorch eager, compiled, and compiled with cuDNN's attention |
# | kernels   | TFLOP/s or GB/s of each instruction, beside its limit and its prediction |
# | right     | conformance tests, loss curves on CPU and GPU, compute-sanitizer |
# | calibrate | a measured profile, and the predicted step with it |
# | nccl      | several processes on one GPU against one process |
#
# A part ends within its time limit; what it has found until then is kept, and the table is written after every part.
# Without a usable GPU every part is skipped with the reason, and the exit code is 0. A part that fails does not stop
# the others; the exit code is then 1. Requires bash and python3, and cargo unless programs are given or lie in bin/, as
# in the archive of benches/pack.sh.
#
# | option                 | default              | meaning |
# |------------------------|----------------------|---------|
# | --output DIR           | bench-gpu-DATE       | raw outputs, one folder per part, and table.md |
# | --time-limit S         | 460                  | seconds for each part |
# | --binary FILE          | bin/narrows, or built | the program `narrows` |
# | --gpu-tests FILE       | bin/gpu-tests, or built | the test program of runtime/cuda/tests/gpu |
# | --python FILE          | python3              | a Python; with torch, for `speed` |
# | --peak-flops N         | by the GPU's name    | dense bf16 FLOP/s that MFU refers to |
# | --curve M,B,L,N        | cola-60m,4,256,40    | model, sequences, their length and steps of the loss curves |
# | --calibrate FLAGS      | --quick              | further flags of `narrows calibrate --backend cuda` |
# | --speed M,B,L,N        | cola-1b,4,4096,20    | as --curve, for `speed` and `kernels` |
# | --nccl M,B,L,N         | cola-60m,4,256,10    | as --curve, for `nccl` |
# | --sanitize M,B,L,N     | cola-60m,1,128,2     | as --curve, for compute-sanitizer |
# | --warm-up N            | 5                    | first steps of `speed` that are not timed |
# | --processes N,M        | 2,4                  | numbers of processes of `nccl` |
# | --one-gpu-by WAY       | host                 | how NCCL accepts several processes on one GPU: `host` (each claims to be another host, connected by sockets), or `multi-rank` (NCCL 2.30.3 or newer) |
# | --torch-device D       | cuda                 | where PyTorch runs: `cpu` tests this script |
# shellcheck disable=SC2329 # parts are called by their names
set -euo pipefail

PARTS=(speed kernels right calibrate nccl)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
figures=$here/benches/gpu_figures.py
torch_step=$here/benches/step/torch_step.py

out=bench-gpu-$(date -u +%Y-%m-%dT%H%M)
selected=() time_limit=460 binary='' gpu_tests='' python=python3 peak_flops=''
curve=cola-60m,4,256,40 speed=cola-1b,4,4096,20 nccl=cola-60m,4,256,10 sanitize=cola-60m,1,128,2
calibrate=--quick warm_up=5 processes=2,4 one_gpu_by=host torch_device=cuda
command_line="benches/gpu.sh $*"

usage() {
    sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

refuse() {
    echo "error: $1 (benches/gpu.sh --help)" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --help) usage; exit ;;
        --list)
            (($# == 1)) || refuse "--list takes nothing after it, and here is $2"
            printf '%s\n' "${PARTS[@]}"
            exit
            ;;
        -*) ;;
        *)
            [[ " ${PARTS[*]} " == *" $1 "* ]] || refuse "there is no part $1"
            selected+=("$1")
            shift
            continue
            ;;
    esac
    (($# > 1)) || refuse "$1 is unknown, or needs a value"
    case $1 in
        --output) out=$2 ;;
        --time-limit) time_limit=$2 ;;
        --binary) binary=$2 ;;
        --gpu-tests) gpu_tests=$2 ;;
        --python) python=$2 ;;
        --peak-flops) peak_flops=$2 ;;
        --curve) curve=$2 ;;
        --calibrate) calibrate=$2 ;;
        --speed) speed=$2 ;;
        --nccl) nccl=$2 ;;
        --sanitize) sanitize=$2 ;;
        --warm-up) warm_up=$2 ;;
        --processes) processes=$2 ;;
        --one-gpu-by) one_gpu_by=$2 ;;
        --torch-device) torch_device=$2 ;;
        *) refuse "$1 is unknown" ;;
    esac
    shift 2
done
((${#selected[@]})) || selected=("${PARTS[@]}")

# Refuses a value that does not have the form of its option.
require() {
    local option=$1 value=$2 form=$3 expected=$4
    [[ $value =~ ^$form$ ]] || refuse "$option takes $expected, not '$value'"
}
number='[1-9][0-9]{0,8}'
require --time-limit "$time_limit" "$number" 'a number of seconds'
require --warm-up "$warm_up" "(0|$number)" 'a number of steps'
require --processes "$processes" "$number(,$number)*" 'numbers of processes, as in 2,4'
require --peak-flops "$peak_flops" '([0-9]+(\.[0-9]+)?(e[0-9]+)?)?' 'a number, as in 989e12'
for option in curve speed nccl sanitize; do
    require "--$option" "${!option}" "[^,[:space:]]+,$number,$number,$number" 'a model and three numbers, as in cola-60m,4,256,40'
done
[[ $one_gpu_by == host || $one_gpu_by == multi-rank ]] || refuse "--one-gpu-by takes host or multi-rank, not $one_gpu_by"

# ---- Shared by all parts

# Runs a command with its output in DIR/NAME.out and DIR/NAME.err, and records the exact command. Environment variables
# can precede the command, as for env.
logged() {
    local name=$1
    shift
    { printf '%q ' "$@"; echo; } >>"$dir/commands"
    local code=0
    env "$@" >"$dir/$name.out" 2>"$dir/$name.err" || code=$?
    if ((code)); then
        echo "$name exited with $code: $(tail -n 3 "$dir/$name.err" | tr '\n' ' ')" >"$dir/reason"
        return "$code"
    fi
}

# Ends a part that lacks something it needs, with the reason.
skip() {
    echo "$1" >"$dir/reason"
    exit 77
}

# Appends the rows that gpu_figures.py prints to the table. It exits with 1 if a check fails.
rows() {
    if ! python3 "$figures" "$@" >>"$dir/rows.tsv" 2>"$dir/figures.err"; then
        { tail -n 1 "$dir/figures.err" | grep . || echo 'a check failed'; } >"$dir/reason"
        return 1
    fi
}

# The flags of `narrows run` for MODEL,SEQUENCES,LENGTH,STEPS.
run_flags() {
    local model sequences length steps
    IFS=, read -r model sequences length steps <<<"$1"
    echo "--model $model --global-batch $sequences --sequence-length $length --steps $steps"
}

# ---- The parts, each in a process of its own with $dir as its folder

# Tokens a second and MFU, compared with PyTorch from the same weights on the same tokens.
part_speed() {
    local model sequences length steps
    IFS=, read -r model sequences length steps <<<"$speed"
    ((steps > warm_up)) || skip "a warm-up of $warm_up leaves none of $steps steps"
    # One batch: as many windows as a step has sequences. Every step has the same sequences, in another order.
    rows tokens --model "$model" --count $((sequences * length + 1)) "$dir/batch.tokens"
    local -a run
    read -ra run <<<"run $(run_flags "$speed") --data $dir/batch.tokens --learning-rate 1e-3 --format json"
    logged narrows "$binary" "${run[@]}" --backend cuda \
        --metrics "$dir/narrows.jsonl" --output "$dir/plan.json"
    logged flops "$binary" cost "$dir/plan.json" --format json
    rows speed "$speed" --warm-up "$warm_up" --peak-flops "$peak_flops" --cost "$dir/flops.out" "$dir/narrows.jsonl"
    rows predict --warm-up "$warm_up" "$dir/narrows.jsonl" "data sheet=$dir/flops.out"
    microbatches || true
    if ! "$python" -c 'import torch' 2>/dev/null; then
        printf 'PyTorch\tleft out\tthis Python has no torch: pass --python\t\n' >>"$dir/rows.tsv"
        return
    fi
    # The initial weights, as a checkpoint after one step whose learning rate changes no weight. Needs no GPU.
    logged weights "$binary" run --model "$model" --hardware cpu-local --global-batch 1 --sequence-length 8 \
        --steps 1 --memory-limit none --learning-rate 1e-30 --weight-decay 0 --checkpoint-dir "$dir/weights"
    rows rates "$dir/narrows.jsonl" "$dir/rates"
    local mode failed=0
    for mode in compile eager compile-cudnn; do
        # shellcheck disable=SC2016 # the inner shell expands them
        logged "torch-$mode" bash -c '"$@" <"$0"' "$dir/rates" "$python" "$torch_step" "$mode" \
            --model "$model" --sequences "$sequences" --length "$length" --device "$torch_device" \
            --dtype bfloat16 --checkpoint "$dir/weights/step-00000001" --tokens "$dir/batch.tokens" || true
        rows torch "$speed" --warm-up "$warm_up" --peak-flops "$peak_flops" "$dir/narrows.jsonl" "$mode" "$dir/torch-$mode.out" || failed=1
    done
    # The checkpoint takes three times the memory of the weights in f32.
    rm -rf "$dir/weights" "$dir/reason"
    return "$failed"
}

# Tokens a second with other sizes of the microbatch than the planned one.
microbatches() {
    local model sequences length steps size
    IFS=, read -r model sequences length steps <<<"$speed"
    local -a run
    read -ra run <<<"run $(run_flags "$speed") --learning-rate 1e-3 --backend cuda --format json"
    for size in 1 2 4 8; do
        ((sequences % size == 0)) || continue
        # A size that does not fit has no row.
        logged "microbatch-$size" "$binary" "${run[@]}" --micro-batch "$size" --metrics "$dir/microbatch-$size.jsonl" || continue
        rows microbatch "$speed" --warm-up "$warm_up" --peak-flops "$peak_flops" "$size" "$dir/microbatch-$size.jsonl"
    done
    rm -f "$dir/reason"
}

# The time of a step by instruction, with the rate of each.
part_kernels() {
    local -a run
    read -ra run <<<"run $(run_flags "$speed") --learning-rate 1e-3 --backend cuda --eager --format json"
    logged eager "$binary" "${run[@]}" --trace "$dir/trace.json" --metrics "$dir/eager.jsonl"
    rows trace "$speed" --peak-flops "$peak_flops" "$dir/eager.out" "$dir/trace.json"
}

# The tests of the CUDA backend, the loss curves of CPU and GPU, and compute-sanitizer.
part_right() {
    local failed=0
    conformance_tests || failed=1
    loss_curves || failed=1
    sanitizer || failed=1
    return "$failed"
}

# Conformance with the reference, graphs against eager launches, failures.
conformance_tests() {
    local -a tests=("$gpu_tests")
    if [[ -z $gpu_tests ]]; then
        if ! command -v cargo >/dev/null; then
            printf 'conformance suite\tleft out\tcargo is missing, which builds the tests: pass --gpu-tests\t\n' >>"$dir/rows.tsv"
            return
        fi
        tests=(cargo test --release --manifest-path "$here/Cargo.toml" -p narrows-cuda --test gpu --)
    fi
    logged tests NARROWS_TEST_GPU=1 "${tests[@]}" --nocapture --test-threads 1 && rows conformance "$dir/tests.out"
}

# The loss curve on the CPU, on the GPU in f32, and on the GPU in mixed precision.
loss_curves() {
    local -a run
    read -ra run <<<"run $(run_flags "$curve") --learning-rate 1e-3 --format json"
    # With a CPU profile the plan is in f32 on every backend.
    logged cpu "$binary" "${run[@]}" --hardware cpu-local --metrics "$dir/cpu.jsonl" &&
        logged f32 "$binary" "${run[@]}" --backend cuda --hardware cpu-local --metrics "$dir/f32.jsonl" &&
        logged bf16 "$binary" "${run[@]}" --backend cuda --metrics "$dir/bf16.jsonl" &&
        rows curve "$curve" "$dir/cpu.jsonl" "$dir/f32.jsonl" "$dir/bf16.jsonl"
}

# Memory errors, and races in shared memory, over a few eager steps.
sanitizer() {
    if ! command -v compute-sanitizer >/dev/null; then
        printf 'compute-sanitizer\tleft out\tnot installed: it is part of the CUDA toolkit\t\n' >>"$dir/rows.tsv"
        return
    fi
    local tool failed=0
    local -a run
    read -ra run <<<"run $(run_flags "$sanitize") --backend cuda --eager"
    for tool in memcheck racecheck; do
        local code=0
        logged "$tool" compute-sanitizer --tool "$tool" --target-processes all --print-limit 10000 --error-exitcode 9 \
            "$binary" "${run[@]}" || code=$?
        rows sanitize "$sanitize" "$tool" "$code" "$dir/$tool.out" || failed=1
    done
    return "$failed"
}

# A hardware profile of this GPU, and the predicted step time with it.
part_calibrate() {
    local -a extra_flags
    read -ra extra_flags <<<"$calibrate"
    logged calibrate "$binary" calibrate --backend cuda "${extra_flags[@]}" --output "$dir/profile.json" --format json
    rows calibrate "$dir/profile.json"
    if [[ -s $out/speed/narrows.jsonl ]]; then
        logged calibrated "$binary" cost "$out/speed/plan.json" --hardware "$dir/profile.json" --format json
        rows predict --warm-up "$warm_up" "$out/speed/narrows.jsonl" "calibrated=$dir/calibrated.out"
    fi
}

# Losses of several processes on one GPU that shard every layer, compared with those of one process.
part_nccl() {
    local -a run
    read -ra run <<<"run $(run_flags "$nccl") --learning-rate 1e-3 --backend cuda --format json"
    local precision count
    for precision in f32 bf16; do
        local -a command=("${run[@]}")
        # With a CPU profile the plan is in f32.
        [[ $precision == bf16 ]] || command+=(--hardware cpu-local)
        logged "$precision-1" CUDA_VISIBLE_DEVICES=0 "$binary" "${command[@]}" --metrics "$dir/$precision-1.jsonl"
        for count in ${processes//,/ }; do
            launch "$precision-$count" "$count" "${command[@]}" --strategy btp --tensor "$count" --pipeline 1 \
                --metrics "$dir/$precision-$count.jsonl"
            rows btp "$nccl" "$precision" "$count" "$dir/$precision-1.jsonl" "$dir/$precision-$count.jsonl"
        done
    done
}

# Runs COUNT processes of narrows, all on GPU 0.
launch() {
    local name=$1 count=$2 rank port failed=0
    shift 2
    port=$(python3 "$figures" port)
    local -a children=()
    for ((rank = 0; rank < count; rank++)); do
        local -a nccl=(NCCL_MULTI_RANK_GPU_ENABLE=1)
        [[ $one_gpu_by == multi-rank ]] || nccl=("NCCL_HOSTID=narrows-$rank" NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo)
        logged "$name-rank-$rank" CUDA_VISIBLE_DEVICES=0 "${nccl[@]}" RANK="$rank" WORLD_SIZE="$count" \
            LOCAL_RANK="$rank" LOCAL_WORLD_SIZE="$count" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" \
            "$binary" "$@" --collective-timeout 120 &
        children+=($!)
    done
    for rank in "${!children[@]}"; do
        wait "${children[rank]}" || failed=1
    done
    return "$failed"
}

# Runs a part within the time limit, in a process group of its own, and returns its exit code. Must not be part of a
# condition, which would disable `set -e` in the part.
limited() {
    set -m
    (set -e; "part_$1") &
    local part=$! code
    (sleep "$time_limit"; touch "$dir/out-of-time"; kill -TERM -- "-$part") 2>/dev/null &
    local watchdog=$!
    set +m
    wait "$part" 2>/dev/null
    code=$?
    kill -TERM -- "-$watchdog" 2>/dev/null
    wait "$watchdog" 2>/dev/null
    return "$code"
}

# ---- Main

command -v python3 >/dev/null || refuse 'python3 is missing'
mkdir -p "$out/machine"
out=$(cd "$out" && pwd)
[[ -n $binary || ! -x $here/bin/narrows ]] || binary=$here/bin/narrows
[[ -n $gpu_tests || ! -x $here/bin/gpu-tests ]] || gpu_tests=$here/bin/gpu-tests
if [[ -z $binary ]]; then
    command -v cargo >/dev/null || refuse 'cargo is missing, which builds narrows: install it, or pass --binary'
    cargo build --release --manifest-path "$here/Cargo.toml"
    binary=${CARGO_TARGET_DIR:-$here/target}/release/narrows
fi
binary=$(realpath "$binary")
[[ -z $gpu_tests ]] || gpu_tests=$(realpath "$gpu_tests")

"$binary" doctor --format json >"$out/machine/doctor.json"
nvidia-smi >"$out/machine/nvidia-smi" 2>&1 || echo 'nvidia-smi failed' >"$out/machine/nvidia-smi"
{ cat "$here/bin/commit" 2>/dev/null || git -C "$here" describe --always --dirty 2>/dev/null || echo unknown; } >"$out/machine/commit"
"$python" -c 'import torch; print(torch.__version__, torch.version.cuda)' >"$out/machine/torch" 2>/dev/null ||
    echo none >"$out/machine/torch"
echo "$command_line" >"$out/machine/command"
# Why the GPU cannot be used; empty if it can.
no_gpu=$(python3 "$figures" why-no-gpu "$out/machine/doctor.json")

any_failed=0
for part in "${PARTS[@]}"; do
    # Results of an earlier call are kept.
    [[ -e $out/$part/state ]] || { mkdir -p "$out/$part"; echo 'skipped: not selected' >"$out/$part/state"; }
done
for part in "${selected[@]}"; do
    dir=$out/$part
    rm -rf "$dir"
    mkdir -p "$dir"
    if [[ -n $no_gpu ]]; then
        echo "skipped: $no_gpu" >"$dir/state"
    else
        echo "$part: started" >&2
        nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader,nounits --loop=2 \
            >"$dir/clocks" 2>/dev/null &
        sampler=$!
        set +e
        limited "$part"
        code=$?
        kill "$sampler" 2>/dev/null
        wait "$sampler" 2>/dev/null
        set -e
        reason=$(cat "$dir/reason" 2>/dev/null || true)
        if [[ -e $dir/out-of-time ]]; then
            code=124 reason="not finished after $time_limit s"
        fi
        case $code in
            0) echo 'done' ;;
            77) echo "skipped: $reason" ;;
            *) echo "failed: ${reason:-exit code $code}" ;;
        esac >"$dir/state"
    fi
    state=$(<"$dir/state")
    echo "$part: $state" >&2
    [[ $state != failed* ]] || any_failed=1
    python3 "$figures" table "$out" "${PARTS[@]}" >"$out/table.md"
done
cat "$out/table.md"
tar -C "$(dirname "$out")" -czf "$out.tar.gz" "$(basename "$out")"
exit "$any_failed"
