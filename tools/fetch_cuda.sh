#!/bin/sh
# Fetches NVIDIA's CUDA 13 compiler, its headers and cuBLASLt from PyPI (0.5 GB) into .cache and
# prints the path of nvcc. Fetched once; fails with a reason where PyPI cannot be reached.
set -eu
cache="$(cd "$(dirname "$0")/.." && pwd)/.cache/cuda"
if [ ! -d "$cache" ]; then
  "$(dirname "$0")/fetch_wheels.sh" "$cache" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
    nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
    nvidia-cublas==13.1.0.3
fi
toolkit="$cache/nvidia/cu13"
[ -e "$toolkit/lib64" ] || ln -s lib "$toolkit/lib64" # where nvcc and CMake look
echo "$toolkit/bin/nvcc"
