#!/bin/sh
# What `kvloom new` writes, as its author meets it: a plugin of each kind is generated, built, installed from its wheel,
# listed as ok, and held to the requirements of its kind. check_new.sh BIN, the bin folder of an environment with kvloom
# and kvloom-testkit in it; packages are made in the current directory.
set -eu
bin=$1
kinds="backend serializer connector tokens retriever executor observer"

"$bin/python" -m pip install --quiet "setuptools>=77"
for kind in $kinds; do
    "$bin/kvloom" new "$kind" fresh
    "$bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels "./kvloom-$kind-fresh"
done
"$bin/python" -m pip install --quiet --no-deps wheels/*.whl
"$bin/kvloom" plugins --check --json >new.json
"$bin/python" - $kinds <<'PY'
import json
import sys

states = {plugin["name"]: plugin["state"] for plugin in json.load(open("new.json"))}
wrong = [f"{kind}_fresh is {states.get(f'{kind}_fresh', 'not listed')}" for kind in sys.argv[1:]
         if states.get(f"{kind}_fresh") != "ok"]
sys.exit(f"kvloom plugins: {', '.join(wrong)}" if wrong else 0)
PY
for kind in $kinds; do
    options=
    [ "$kind" != backend ] || options="--set path={tmp}"
    # shellcheck disable=SC2086
    "$bin/kvloom" check "$kind" fresh $options
done
(cd kvloom-connector-fresh && "$bin/python" -m pytest -q -p no:cacheprovider) # the other door to the same tests
