#!/bin/sh
# A virtual environment with torch in it: make_venv.sh PYTHON FOLDER
set -eu
python=$1
folder=$2

if [ -z "$python" ]; then
    echo "kvloom needs Python 3.11 or later and none was found. Name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
"$python" - <<'PY'
import sys

if sys.version_info < (3, 11):
    have = "%d.%d" % sys.version_info[:2]
    sys.exit("kvloom needs Python 3.11 or later and %s is %s. Name another: make PYTHON=/path/to/python3.11"
             % (sys.executable, have))
PY

echo "Setting up $folder with $("$python" --version) ..."
if ! "$python" -m venv "$folder"; then
    echo "The environment could not be made. On Debian and Ubuntu the module is a package: python3-venv." >&2
    exit 1
fi
echo "Installing torch ..."
if ! "$folder/bin/python" -m pip install --quiet --constraint constraints.txt torch; then
    cat >&2 <<TEXT

torch could not be installed; pip says why above. If it found no such version, there is no wheel of
$(grep '^torch==' constraints.txt) for $("$python" --version) on $(uname -sm). Use another Python, make PYTHON=/path/to/python3.11,
or tell pip where wheels are, for example with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
TEXT
    exit 1
fi
