#!/bin/sh
# The packages that `make test-gpu` needs beside torch and numpy, into build/gpu-packages-VERSION, for a machine without a
# network: run it where there is one, and copy the tree with that folder.
#
#   sh scripts/gpu_packages.sh PYTHON [VERSION]
#
# PYTHON: has pip. VERSION: that of the other machine's Python, 3.12 if it is not given; Linux on x86-64.
set -eu
python=$1 version=${2:-3.12}
cd "$(dirname "$0")/.."
folder=build/gpu-packages-$version
rm -rf "$folder"
"$python" -m pip install --quiet --no-compile --target "$folder" --only-binary :all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
    --constraint constraints.txt pluggy pydantic pyyaml xxhash safetensors fsspec pytest hypothesis
echo "$folder: $(du -sm "$folder" | cut -f 1) MiB, which make test-gpu finds there"
