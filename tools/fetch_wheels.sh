#!/bin/sh
# tools/fetch_wheels.sh FOLDER WHEEL==VERSION…: unpacks wheels of PyPI into a new folder, which is
# there afterwards only if all could be fetched; fails with a reason where PyPI cannot be reached.
set -eu
folder=$1
shift
mkdir -p "$(dirname "$folder")"
work="$(mktemp -d "$folder.XXXXXX")"
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps \
  --dest "$work/wheels" "$@" >&2 || {
  echo "fetch_wheels.sh: cannot fetch from PyPI: $*" >&2
  exit 1
}
python3 - "$work" <<'PYTHON' >&2
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
for path in (work / "wheels").glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            place = pathlib.Path(wheel.extract(member, work / "all"))
            if member.external_attr >> 16 & 0o100:
                place.chmod(0o755)
    path.unlink()
PYTHON
mv "$work/all" "$folder"
