#!/usr/bin/env bash
# Builds, tests and measures the CUDA backend on a machine with a Hopper GPU.
#   tools/gpu.sh [build] [test] [sanitize] [exactness] [bench] [memory] [smollm2]
# No argument: all of them. OCTET_BUILD names the build folder (default build-cuda); results are
# appended to $OCTET_RESULTS (default gpu-results.txt). `memory` writes 16 GB into $OCTET_SCRATCH
# (default /dev/shm) and removes them again; `smollm2` needs PyPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${OCTET_BUILD:-build-cuda}
results=${OCTET_RESULTS:-gpu-results.txt}
octet=$build/octet
parity=$build/tests/parity/cuda/cuda_parity_test

run() {
  echo "\$ octet $*" | tee -a "$results"
  "$octet" "$@" 2>&1 | grep -v "product " | tee -a "$results"
}

build_all() {
  cmake --preset cuda -DOCTET_TESTS=ON >/dev/null
  cmake --build "$build" --target octet --target cuda_parity_test
}

test_all() { "$parity" --gtest_brief=1 2>&1 | tee -a "$results"; }

# Small cases of every kernel under the memory checker.
sanitize() {
  compute-sanitizer --error-exitcode 1 --tool memcheck "$parity" --gtest_brief=1 \
    --gtest_filter='OpsCuda.Conv*:OpsCuda.Act*:OpsCuda.Norms*:OpsCuda.Rot*:OpsCuda.LogProbs*:OpsCuda.Opt*:QuantizeCuda.Bl*:QuantizeCuda.All*:LinearCuda.*Gradient*:AttentionCuda.Back*:AttentionCuda.Copies*:AttentionCuda.Appends*:AttentionCuda.Forward*' \
    2>&1 | tee -a "$results"
  compute-sanitizer --error-exitcode 1 --tool racecheck "$parity" --gtest_brief=1 \
    --gtest_filter='OpsCuda.Norms*:OpsCuda.LogProbs*:LinearCuda.WeightG*:AttentionCuda.Back*' \
    2>&1 | tee -a "$results"
}

# 0 differing log-probabilities between decoding and one scoring pass: every flow, granularity and
# KV type; small steps of prefill, preemption, and samples that share a prompt.
exactness() {
  local layers=${OCTET_LAYERS:-4} common
  common=(bench exactness --layers "$layers" --prompts 64 --prompt-tokens 100 --new-tokens 256)
  for kv in bf16 fp8; do
    run "${common[@]}" --flow bf16 --kv-cache-dtype "$kv"
    for scales in tensor channel block; do
      run "${common[@]}" --flow fp8_lora --lora-rank 32 --load-in-fp8 "$scales" --kv-cache-dtype "$kv"
      run "${common[@]}" --flow fp8_full --load-in-fp8 "$scales" --kv-cache-dtype "$kv"
    done
  done
  run "${common[@]}" --batch-tokens 96
  run "${common[@]}" --kv-tokens 12000
  run bench exactness --layers "$layers" --prompts 8 --n 8 --prompt-tokens 100 --new-tokens 256
  run bench exactness --prompts 64 --prompt-tokens 100 --new-tokens 256  # all 36 layers
}

bench() {
  local batch
  for batch in 1 16 64 256; do
    run bench rollout --prompts "$batch" --flow bf16 --kv-cache-dtype bf16
    run bench rollout --prompts "$batch" --load-in-fp8 channel
    run bench rollout --prompts "$batch" --load-in-fp8 block
  done
  run bench rollout --prompts 256 --load-in-fp8 tensor
  run bench rollout --prompts 16 --n 16 --load-in-fp8 channel
  run bench rollout --prompts 16 --n 16 --flow bf16 --kv-cache-dtype bf16
  run bench rollout --prompts 512 --load-in-fp8 channel
}

# 200 rollouts, the pool unmapped and mapped again, the plan against the peak, and a start from files.
memory() {
  local folder=${OCTET_SCRATCH:-/dev/shm}/octet-qwen3-8b
  run bench rollout --layers 4 --prompts 16 --prompt-tokens 200 --new-tokens 16 --repeat 200 --remap
  run bench rollout --prompts 64 --prompt-tokens 1000 --new-tokens 64 --load-in-fp8 channel --remap
  run bench load --folder "$folder"
  run bench load --folder "$folder"
  rm -r "$folder"
}

smollm2() {
  local folder
  folder=$(mktemp -d)
  "$octet" import "$(tools/fetch_smollm2.sh)" "$folder/model"
  tools/compare_devices.py "$octet" "$folder/model" 2>&1 | tee -a "$results"
  rm -r "$folder"
}

[ $# -gt 0 ] || set -- build test sanitize exactness bench memory smollm2
for section in "$@"; do
  case "$section" in
    build) build_all ;;
    test) test_all ;;
    sanitize) sanitize ;;
    exactness) exactness ;;
    bench) bench ;;
    memory) memory ;;
    smollm2) smollm2 ;;
    *)
      echo "gpu.sh: unknown section \"$section\"" >&2
      exit 2
      ;;
  esac
done
