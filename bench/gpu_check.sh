#!/usr/bin/env bash
# Runs the CUDA tests and the kernel benchmarks on one GPU in under 8 minutes and prints one table.
# Needs this repository, torch, triton, pytest and pytest-benchmark; installs nothing.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}

if ! "$python" -c "import cotutor.kernels" 2>/dev/null; then
    links=$(mktemp -d)
    mkdir "$links/cotutor"
    for folder in kernels rollout trainer; do ln -s "$PWD/$folder" "$links/cotutor/$folder"; done
    export PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}"
fi
unset TRITON_INTERPRET
"$python" -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'no CUDA device')" || exit 2

# Warnings are errors in the tests, but what another version of a library warns of is no fault here.
run() { timeout "$1" "$python" -m pytest -q -p no:cacheprovider -W default "${@:2}"; }
wrong=0 late=0
count() { case $1 in 0 | 5) ;; 124) late=1 ;; *) wrong=1 ;; esac; } # 5: nothing of it runs here

run 90 tests/kernels/test_on_gpu.py
count $?

# One process a file, because most of their time is compilation. What a CPU proves as well is left
# out: the interpreter's counts, ahead-of-time compilation, and the tests of the tests.
logs=$(mktemp -d)
names=() jobs=()
for file in tests/kernels/test_*.py; do
    case $file in *_on_gpu.py | *_aot.py | *_bytes.py | *_faults.py | *_mutations_jsd.py) continue ;; esac
    name=$(basename "$file" .py)
    run 170 "$file" >"$logs/$name" 2>&1 &
    names+=("$name") jobs+=($!)
done
for i in "${!jobs[@]}"; do
    wait "${jobs[$i]}"
    code=$?
    count $code
    echo "${names[$i]}: exit code $code"
    if [ $code = 0 ]; then tail -n 1 "$logs/${names[$i]}"; else tail -n 40 "$logs/${names[$i]}"; fi
done

# No speed of what is wrong: the benchmarks check values and gradients again before they time.
if [ $wrong = 0 ]; then
    run 200 bench/bench_topk_jsd.py bench/bench_token_logprobs.py \
        bench/bench_importance_weights.py --benchmark-only
    count $?
    "$python" bench/render.py --kind gpu || wrong=1
fi
[ $late = 0 ] || echo "Something ran out of time: exit code 124 above." >&2
exit $((wrong || late))
