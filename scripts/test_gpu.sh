#!/bin/sh
# The CUDA kernels on a machine that has a GPU, from the source tree: nvcc, a C++ compiler, and a Python with torch, numpy,
# pydantic, pluggy, pyyaml, xxhash, safetensors, and pytest and hypothesis for the tests. No network.
#
#   sh scripts/test_gpu.sh PYTHON [bench]
set -eu
python=${1:-python3}
package=plugins/serde_cachegen/src/kvloom_serde_cachegen
csrc=plugins/serde_cachegen/csrc
PYTHONPATH=core/src:testkit/src:bench$(for each in plugins/*/src; do printf ':%s' "$each"; done)
export PYTHONPATH

cpu="-std=c++17 -O3 -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -w"
x86=""
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
if [ "$(uname -m)" = x86_64 ]; then
    x86="-DKVZ_X86"
    g++ $cpu $x86 -mavx2 -mbmi -mpopcnt -c $csrc/avx2.cpp -o "$objects/avx2.o" &
    g++ $cpu $x86 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd -mbmi -mbmi2 -mpopcnt -mprefer-vector-width=512 \
        -c $csrc/avx512.cpp -o "$objects/avx512.o" &
fi
g++ $cpu $x86 -c $csrc/portable.cpp -o "$objects/portable.o" &
g++ $cpu $x86 -c $csrc/api.cpp -o "$objects/api.o" &
nvcc -std=c++17 -O3 --fmad=false --threads 0 -diag-suppress 20091 -Xcompiler -fPIC,-ffp-contract=off,-fvisibility=hidden \
    -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90 \
    -cudart static -shared $csrc/cuda.cu -o $package/libkvz_cuda.so
wait
g++ -shared "$objects"/*.o -pthread -o $package/libkvz.so

"$python" -c 'from kvloom_serde_cachegen import device; print(device.about()); assert device.library()'
if [ "${2:-test}" = bench ]; then
    "$python" bench/codec_gpu.py
    exit
fi
tests=plugins/serde_cachegen/tests/test_device.py
"$python" -m pytest -q -p no:cacheprovider $tests
# Every access of the kernels, and who reads what others write; a few examples are enough and take minutes.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in memcheck racecheck; do
    "$sanitizer" --tool $tool --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider $tests -k "tiles or bad or serializer"
done
