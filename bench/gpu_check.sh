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

status=0
timeout 110 "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_on_gpu.py || status=1
timeout 110 "$python" -m pytest -q -p no:cacheprovider tests/kernels \
    --ignore=tests/kernels/test_on_gpu.py --ignore=tests/kernels/test_aot.py \
    --ignore=tests/kernels/test_bytes.py || status=1
# No speed of what is wrong: the benchmarks check values and gradients again before they time.
if [ "$status" = 0 ]; then
    timeout 240 "$python" -m pytest -q -p no:cacheprovider bench/bench_topk_jsd.py \
        bench/bench_token_logprobs.py bench/bench_importance_weights.py --benchmark-only || status=1
    "$python" bench/render.py --kind gpu || status=1
fi
exit $status
