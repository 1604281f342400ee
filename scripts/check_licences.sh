#!/bin/sh
# Every wheel in dist/ with every extra in a fresh environment, and the licences of all that came with them.
# check_licences.sh PYTHON [--write], which writes docs/licences.md
set -eu
python=$1
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

sh scripts/make_venv.sh "$python" "$place/venv"
echo "Installing every package with every extra ..."
"$place/venv/bin/python" scripts/wheels.py >"$place/everything.txt"
"$place/venv/bin/python" -m pip install --quiet --no-compile --constraint constraints.txt --requirement "$place/everything.txt"
"$place/venv/bin/python" scripts/licences.py "$@"
