#!/bin/sh
# Editable installs hide a missing entry point or module. So: the wheels in dist/ in an environment of their own, in
# which every plugin of this repository must be listed as ok. check_wheels.sh PYTHON
set -eu
python=$1
plugins="builtin testkit $(ls plugins)"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

scripts=$PWD/scripts
sh scripts/make_venv.sh "$python" "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --constraint constraints.txt dist/*.whl

cd "$place" # away from the sources
"$place/venv/bin/kvloom" --help
"$place/venv/bin/kvloom" plugins
"$place/venv/bin/kvloom" plugins --json >listing.json
"$place/venv/bin/python" - $plugins <<'PY'
import json
import sys

states = {plugin["name"]: plugin["state"] for plugin in json.load(open("listing.json"))}
wrong = [f"{name} is {states.get(name, 'not listed')}" for name in sys.argv[1:] if states.get(name) != "ok"]
sys.exit(f"kvloom plugins: {', '.join(wrong)}" if wrong else 0)
PY

mkdir new
cd new
sh "$scripts/check_new.sh" "$place/venv/bin"
