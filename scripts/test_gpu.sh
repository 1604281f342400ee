#!/bin/sh
# The CUDA kernels on a machine that has a GPU, from the source tree: nvcc, a C++ compiler, and a Python with torch, numpy,
# pydantic, pluggy, pyyaml, xxhash, safetensors, and pytest and hypothesis for the tests. No network.
#
#   sh scripts/test_gpu.sh PYTHON [bench]
set -eu
python=${1:-python3}
codec=plugins/serde_cachegen
pages=plugins/connector_vllm
blend=plugins/blend
PYTHONPATH=core/src:testkit/src:bench$(for each in plugins/*/src; do printf ':%s' "$each"; done)
export PYTHONPATH

cpu="-std=c++17 -O3 -fPIC -fvisibility=hidden -w"
exact="$cpu -ffp-contract=off -fno-math-errno -fno-trapping-math"
gpu="-std=c++17 -O3 --threads 0 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
    -gencode arch=compute_90,code=compute_90 -cudart static -shared"
x86=""
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
if [ "$(uname -m)" = x86_64 ]; then
    x86="-DKVZ_X86"
    g++ $exact $x86 -mavx2 -mbmi -mpopcnt -c $codec/csrc/avx2.cpp -o "$objects/avx2.o" &
    g++ $exact $x86 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd -mbmi -mbmi2 -mpopcnt -mprefer-vector-width=512 \
        -c $codec/csrc/avx512.cpp -o "$objects/avx512.o" &
fi
g++ $exact $x86 -c $codec/csrc/portable.cpp -o "$objects/portable.o" &
g++ $exact $x86 -c $codec/csrc/api.cpp -o "$objects/api.o" &
nvcc $gpu --fmad=false -diag-suppress 20091 -Xcompiler -fPIC,-ffp-contract=off,-fvisibility=hidden \
    $codec/csrc/cuda.cu -o $codec/src/kvloom_serde_cachegen/libkvz_cuda.so
wait
g++ -shared "$objects"/*.o -pthread -o $codec/src/kvloom_serde_cachegen/libkvz.so
g++ $cpu -shared $pages/csrc/paged.cpp -pthread -o $pages/src/kvloom_connector_vllm/libkvpaged.so
g++ $cpu -shared plugins/native/csrc/*.cpp -o plugins/native/src/kvloom_native/libkvloom.so
nvcc $gpu -Xcompiler -fPIC,-fvisibility=hidden $pages/csrc/paged.cu -o $pages/src/kvloom_connector_vllm/libkvpaged_cuda.so

rotate="$blend/csrc/rotate.cpp $blend/csrc/portable.cpp"
if [ -n "$x86" ]; then
    g++ $exact -DKVR_X86 -mavx2 -mf16c -c $blend/csrc/avx2.cpp -o "$objects/rotate_avx2.o"
    rotate="$rotate $objects/rotate_avx2.o -DKVR_X86"
fi
g++ $exact -shared $rotate -pthread -o $blend/src/kvloom_blend/libkvrotate.so
nvcc $gpu --fmad=false -Xcompiler -fPIC,-ffp-contract=off,-fvisibility=hidden \
    $blend/csrc/rotate.cu -o $blend/src/kvloom_blend/libkvrotate_cuda.so

"$python" -c 'from kvloom_serde_cachegen import device; print(device.about()); assert device.library()'
"$python" -c 'from kvloom_connector_vllm import native; print(native.about_kernels()); assert native.kernels()'
if [ "${2:-test}" = bench ]; then
    "$python" bench/codec_gpu.py
    "$python" bench/paged_gpu.py
    exit
fi
tests="$codec/tests/test_device.py $pages/tests/test_paged_cuda.py $blend/tests/test_rotation.py"
"$python" -m pytest -q -p no:cacheprovider -m "not slow" $tests
# Every access of the kernels, and who reads what others write; a few examples are enough and take minutes.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in memcheck racecheck; do
    "$sanitizer" --tool $tool --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider -m "not slow" $tests \
        -k "tiles or bad or serializer or lossless or cachegen or C02 or C03 or C10 or C11 or reach"
done
