#!/bin/sh
# Formats the C++ and CUDA sources that git tracks, or with --check says which differ.
set -eu
cd "$(dirname "$0")/.."

# Versions of clang-format differ in detail; 14 is the one of Debian 12.
formatter=
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null 2>&1 && "$candidate" --version | grep -q 'version 14\.'; then
    formatter=$candidate
    break
  fi
done
if [ -z "$formatter" ]; then
  echo "format.sh: clang-format 14 is required (apt-get install clang-format-14)" >&2
  exit 1
fi

case "${1:-}" in
  "") git ls-files -z -- '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 -r "$formatter" -i ;;
  --check) git ls-files -z -- '*.h' '*.cpp' '*.cu' '*.cuh' |
    xargs -0 -r "$formatter" --dry-run --Werror ;;
  *)
    echo "usage: tools/format.sh [--check]" >&2
    exit 2
    ;;
esac
