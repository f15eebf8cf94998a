#!/usr/bin/env bash
# Builds, tests and measures the CUDA backend on a machine with an NVIDIA GPU, section by section:
#   tools/gpu.sh SECTION…      each takes seconds to a few minutes; `all` is every one of them
# Results are appended to $OCTET_RESULTS (default gpu-results.txt), so that several short leases of
# a card add up. OCTET_BUILD names the build folder (default build-cuda), OCTET_CHECKPOINT where
# `load` keeps its 16 GB of BF16 files (default /dev/shm/octet-qwen3-8b).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${OCTET_BUILD:-build-cuda}
results=${OCTET_RESULTS:-gpu-results.txt}
octet=$build/octet
parity=$build/tests/parity/cuda/cuda_parity_test
sections=(build test sanitize exactness rollout-bf16 rollout-tensor rollout-channel rollout-block
  rollout-kv rollout-lora attention kernels products memory load smollm2 peers)

usage() { echo "usage: tools/gpu.sh SECTION… of: all ${sections[*]}"; }

# A command and its output, shown and kept.
keep() {
  echo "\$ $*" | tee -a "$results"
  "$@" 2>&1 | tee -a "$results"
}
run() { keep "$octet" "$@"; }

build() {
  cmake --preset cuda -B "$build" -DOCTET_TESTS=ON >/dev/null
  cmake --build "$build" --target octet --target cuda_parity_test --target cuda_rollout_test \
    --target cuda_timing
}

test() {
  keep "$parity" --gtest_brief=1
  keep "$(dirname "$parity")/cuda_rollout_test" --gtest_brief=1
}

# A whole rollout and small cases of every kernel under the memory checker, those that share memory
# under the race one.
sanitize() {
  keep compute-sanitizer --error-exitcode 1 --tool memcheck "$octet" bench exactness \
    --shape smollm2-135m --layers 2 --prompts 8 --n 12 --prompt-tokens 300 --new-tokens 8 \
    --load-in-fp8 channel
  keep compute-sanitizer --error-exitcode 1 --tool memcheck "$parity" --gtest_brief=1 \
    --gtest_filter='OpsCuda.Conv*:OpsCuda.Act*:OpsCuda.Norms*:OpsCuda.Rot*:OpsCuda.LogProbs*:OpsCuda.Opt*:OpsCuda.Filters*:OpsCudaFused.Draws*:OpsCudaFused.Att*:QuantizeCuda.Bl*:QuantizeCuda.All*:*LinearCuda.*Gradient*:AttentionCuda.Back*:AttentionCuda.Copies*:AttentionCuda.Appends*:AttentionCuda.Forward*'
  keep compute-sanitizer --error-exitcode 1 --tool racecheck "$parity" --gtest_brief=1 \
    --gtest_filter='OpsCuda.Norms*:OpsCuda.LogProbs*:OpsCuda.Filters*:*LinearCuda.WeightG*:AttentionCuda.Back*:AttentionCuda.NoContext*'
}

# 0 differing log-probabilities between decoding and one scoring pass: every flow, granularity and
# KV type; small steps of prefill, preemption, and samples that share a prompt.
exactness() {
  local layers=${OCTET_LAYERS:-4} common kv scales
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
  run bench exactness --layers "$layers" --prompts 4 --n 16 --prompt-tokens 700 --new-tokens 256 \
    --lora-rank 32
  run bench exactness --prompts 64 --prompt-tokens 100 --new-tokens 256 --lora-rank 32  # 36 layers
}

rollout() {  # FLAGS…: the format; 1,000 + 1,000 tokens at every batch
  local batch pool=()
  # Of 512 sequences BF16 pages do not fit all at once.
  [[ "$*" != *"--kv-cache-dtype bf16"* ]] || pool=(--kv-tokens 800000)
  for batch in 1 16 64 256; do run bench rollout --prompts "$batch" "$@"; done
  run bench rollout --prompts 512 "${pool[@]}" "$@"
  run bench rollout --prompts 16 --n 16 "$@"
  run bench rollout --prompts 32 --n 16 "$@"
}
rollout-bf16() { rollout --flow bf16 --kv-cache-dtype bf16; }
rollout-tensor() { rollout --load-in-fp8 tensor; }
rollout-channel() {
  rollout --load-in-fp8 channel
  run bench rollout --prompts 860 --load-in-fp8 channel  # all that fits into 141 GB
}
rollout-kv() {  # FP8 weights with BF16 pages, and the other way round
  rollout --load-in-fp8 channel --kv-cache-dtype bf16
  rollout --load-in-fp8 block --kv-cache-dtype bf16
  rollout --load-in-fp8 tensor --kv-cache-dtype bf16
  rollout --flow bf16 --kv-cache-dtype fp8
}
rollout-lora() { rollout --load-in-fp8 channel --lora-rank 32; }  # an adapter on every linear
rollout-block() { rollout --load-in-fp8 block; }

# The small kernels of a step beside what their bytes take.
kernels() { keep "$build/tests/parity/cuda/cuda_timing"; }

attention() {
  run bench attention
  keep python3 tools/peer_attention.py
}

products() { run bench gemm --device cuda:0 --shape qwen3-8b; }

# 200 calls with no growth; the pool unmapped and mapped again.
memory() {
  run bench rollout --prompts 64 --prompt-tokens 100 --new-tokens 50 --repeat 200 --remap
}

load() { run bench load --shape qwen3-8b --folder "${OCTET_CHECKPOINT:-/dev/shm/octet-qwen3-8b}"; }

smollm2() {
  local model=models/SmolLM2-135M-Instruct gguf
  if [ ! -d "$model" ]; then
    gguf=$(tools/fetch_smollm2.sh)
    mkdir -p models
    "$octet" import "$gguf" "$model"
  fi
  keep python3 tools/compare_devices.py "$model" --octet "$octet"
}

# Ours and theirs one after the other, so that the ratio is of one card in one state.
peers() {
  local shape prompts prompt new format json rates
  for shape in "256 128 128" "64 1000 200"; do
    read -r prompts prompt new <<<"$shape"
    rates=()
    for format in "--flow bf16 --kv-cache-dtype bf16" "--load-in-fp8 channel"; do
      # shellcheck disable=SC2086  # several words
      json=$("$octet" bench rollout --prompts "$prompts" --prompt-tokens "$prompt" \
        --new-tokens "$new" $format --json)
      echo "$json" | tee -a "$results"
      rates+=("${format##* }=$(python3 -c \
        'import json, sys; print(json.load(sys.stdin)["tokens_per_second"])' <<<"$json")")
    done
    keep python3 tools/peer_transformers.py --batch "$prompts" --prompt-tokens "$prompt" \
      --new-tokens "$new" --ours "${rates[@]}"
  done
}

[ "$*" = all ] && set -- "${sections[@]}"
for section in "$@"; do
  [[ " ${sections[*]} " == *" $section "* ]] || set --
done
case $# in
  0) usage >&2; exit 2 ;;
  1) "$1"; exit ;;
esac
failed=()
for section in "$@"; do tools/gpu.sh "$section" || failed+=("$section"); done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" | tee -a "$results" >&2; exit 1; }
