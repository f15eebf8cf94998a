#!/bin/sh
# Fetches NVIDIA's CUDA 13 compiler, its headers and cuBLASLt from PyPI (about 0.5 GB) into .cache and
# prints the path of nvcc. Fetched once; fails with a reason where PyPI cannot be reached.
set -eu
wheels="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3"
target="$(cd "$(dirname "$0")/.." && pwd)/.cache/cuda"
if [ ! -d "$target" ]; then
  mkdir -p "$(dirname "$target")"
  work="$(mktemp -d "$target.XXXXXX")"
  trap 'rm -rf "$work"' EXIT
  # shellcheck disable=SC2086  # several words
  python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    --dest "$work" $wheels >&2 || {
    echo "fetch_cuda.sh: cannot fetch from PyPI:" $wheels >&2
    exit 1
  }
  python3 - "$work" <<'PYTHON' >&2
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
for path in work.glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            place = pathlib.Path(wheel.extract(member, work / "all"))
            if member.external_attr >> 16 & 0o100:
                place.chmod(0o755)
    path.unlink()
(work / "all/nvidia/cu13/lib64").symlink_to("lib")
PYTHON
  mv "$work/all/nvidia/cu13" "$target"
fi
echo "$target/bin/nvcc"
