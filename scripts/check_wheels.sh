#!/bin/sh
# Editable installs hide a missing entry point, module or requirement. So: the wheels in dist/ in environments of their own.
# First the core alone, then each other package with nothing but what it asks for, then all together with every extra, where
# nothing may be in conflict and what comes along must be under a licence that we accept. check_wheels.sh PYTHON
set -eu
python=$1
plugins="builtin testkit $(ls plugins)"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

scripts=$PWD/scripts
sh scripts/make_venv.sh "$python" "$place/venv"
bin=$place/venv/bin
"$bin/python" -m pip install --quiet --constraint constraints.txt dist/kvloom-[0-9]*.whl
"$bin/python" scripts/check_alone.py constraints.txt

echo "Installing every package with every extra ..."
"$bin/python" scripts/wheels.py >"$place/everything.txt"
"$bin/python" -m pip install --quiet --no-compile --constraint constraints.txt --requirement "$place/everything.txt"
"$bin/python" -m pip check
"$bin/python" scripts/licences.py

cd "$place" # away from the sources
"$bin/kvloom" --help
"$bin/kvloom" plugins
"$bin/kvloom" plugins --check --json >listing.json
"$bin/python" - $plugins <<'PY'
import json
import sys

states = {plugin["name"]: plugin["state"] for plugin in json.load(open("listing.json"))}
wrong = [f"{name} is {states.get(name, 'not listed')}" for name in sys.argv[1:] if states.get(name) != "ok"]
sys.exit(f"kvloom plugins: {', '.join(wrong)}" if wrong else 0)
PY

mkdir new
cd new
sh "$scripts/check_new.sh" "$bin"
