#!/bin/sh
# The half of kvloom that needs no torch, on the Pythons for which there may be none: configurations, the plugin loader,
# keys, ledgers, storage backends and the conformance kit, in fresh environments. check_matrix.sh [PYTHON ...]
set -eu
[ $# -gt 0 ] || set -- python3.12 python3.13
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
tried=0
for python in "$@"; do
    found=
    for candidate in "$python" "$HOME"/.pyenv/versions/"${python#python}".*/bin/python; do
        if "$candidate" -c "" 2>/dev/null; then # a shim may be there that leads nowhere
            found=$candidate
        fi
    done
    if [ -z "$found" ]; then
        echo "$python is not here; left out"
        continue
    fi
    venv=$place/$(basename "$python")
    "$found" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "setuptools>=77" numpy pluggy pydantic pyyaml xxhash typer rich pytest hypothesis \
        redis hiredis obstore fsspec
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation ./core ./testkit ./plugins/backend_disk \
        ./plugins/backend_redis ./plugins/backend_fsspec
    (
        cd "$place"
        "$venv/bin/python" - <<'PY'
import importlib.util
import sys

import numpy as np

import kvloom
import kvloom.keys
import kvloom.tiers.index.ledger
from kvloom.runtime import SystemRuntime

assert importlib.util.find_spec("torch") is None, "torch is here: this proves nothing"
config = kvloom.EngineConfig.load({"tiers": ["memory", {"type": "disk", "path": "kv", "capacity": "1GiB"}]})
assert [tier.type for tier in config.tiers] == ["memory", "disk"]
states = {plugin.name: plugin.state for plugin in kvloom.Registry.discover().statuses()}
assert all(states[name] == "ok" for name in ("backend_disk", "backend_redis", "backend_fsspec", "testkit")), states
ends = [one.end for one in kvloom.keys.chain(np.arange(40), chunk_tokens=16, fingerprint="f" * 32)]
assert ends == [16, 32]
assert len(kvloom.tiers.index.ledger.Ledger(SystemRuntime(), capacity=1 << 20)) == 0
assert "torch" not in sys.modules
print(f"Python {sys.version.split()[0]}: configurations, loader, keys and ledger work without torch")
PY
        "$venv/bin/kvloom" check backend disk --set "path={tmp}" >checked || { cat checked; exit 1; }
        tail -n 1 checked
    )
    tried=$((tried + 1))
done
echo "$tried of $# Pythons tried"
