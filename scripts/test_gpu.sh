#!/bin/sh
# The CUDA kernels on a machine that has a GPU, from the source tree and without a network.
#
#   sh scripts/test_gpu.sh PYTHON [PART ...]
#
# Parts: `build` compiles the libraries into the source tree; `test` compares them with processors; `memcheck` and
# `racecheck` run some of those tests under compute-sanitizer; `codec` and `paged` write bench/results/<gpu>*.md. Without a
# part: all tests.
# Needs nvcc, g++, and a Python with torch and numpy. The tests need the packages named below too: build/gpu-packages-VERSION
# has them once `make gpu-packages` was run where there is a network. `PYTHONPATH` is kept.
set -eu
python=${1:-python3}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- build test memcheck racecheck

tests=no gpu=no compiles=no
for part in "$@"; do
    case $part in
    test | memcheck | racecheck) tests=yes gpu=yes ;;
    codec | paged) gpu=yes ;;
    build) compiles=yes ;;
    *) echo "no part $part: build, test, memcheck, racecheck, codec, paged" && exit 2 ;;
    esac
done

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHONPATH=$(pwd)/build/gpu-packages-$version${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

"$python" - "$tests" "$gpu" "$compiles" "$version" <<'NEEDS'
import importlib.util, shutil, sys

needed = ("torch", "numpy")  # bench/bare.py stands in for the others
if sys.argv[1] == "yes":
    needed += ("pluggy", "pydantic", "yaml", "xxhash", "safetensors", "pytest", "hypothesis")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    known = f"; `make gpu-packages GPU_VERSION={sys.argv[4]}` fetches all but torch and numpy where there is a network"
    sys.exit(f"{sys.executable} has no {', '.join(missing)}: install them{known if sys.argv[1] == 'yes' else ''}")
absent = [name for name in ("nvcc", "g++") if shutil.which(name) is None]
if absent and sys.argv[3] == "yes":
    sys.exit(f"{' and '.join(absent)} not found: install the CUDA toolkit and a compiler, and add them to PATH")
if sys.argv[2] == "yes":
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device: nothing was built. `make test` runs these kernels on a processor")
NEEDS

codec=plugins/serde_cachegen
pages=plugins/connector_vllm
blend=plugins/blend
PYTHONPATH=core/src:testkit/src:bench$(for each in plugins/*/src; do printf ':%s' "$each"; done):$PYTHONPATH
tests="$codec/tests/test_device.py $pages/tests/test_paged_cuda.py $pages/tests/test_pages.py $pages/tests/test_staging.py
    $blend/tests/test_rotation.py core/tests/test_native.py core/tests/test_on_a_gpu.py
    plugins/connector_transformers/tests/test_on_a_gpu.py"

build() {
    cpu="-std=c++17 -O3 -fPIC -fvisibility=hidden -w"
    exact="$cpu -ffp-contract=off -fno-math-errno -fno-trapping-math"
    gpu="-std=c++17 -O3 --threads 0 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
        -gencode arch=compute_90,code=compute_90 -cudart static -shared"
    x86=""
    objects=$(mktemp -d)
    trap 'rm -rf "$objects"' EXIT
    running=""
    start() { # the commands run side by side; each has to succeed
        "$@" &
        running="$running $!"
    }
    rotate="$blend/csrc/rotate.cpp $blend/csrc/portable.cpp"
    if [ "$(uname -m)" = x86_64 ]; then
        x86="-DKVZ_X86"
        start g++ $exact $x86 -mavx2 -mbmi -mpopcnt -c $codec/csrc/avx2.cpp -o "$objects/avx2.o"
        start g++ $exact $x86 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd -mbmi -mbmi2 -mpopcnt \
            -mprefer-vector-width=512 -c $codec/csrc/avx512.cpp -o "$objects/avx512.o"
        g++ $exact -DKVR_X86 -mavx2 -mf16c -c $blend/csrc/avx2.cpp -o "$objects/rotate_avx2.rotate"
        rotate="$rotate -DKVR_X86 -x none $objects/rotate_avx2.rotate"
    fi
    start g++ $exact $x86 -c $codec/csrc/portable.cpp -o "$objects/portable.o"
    start g++ $exact $x86 -c $codec/csrc/api.cpp -o "$objects/api.o"
    start nvcc $gpu --fmad=false -diag-suppress 20091 -Xcompiler -fPIC,-ffp-contract=off,-fvisibility=hidden \
        $codec/csrc/cuda.cu -o $codec/src/kvloom_serde_cachegen/libkvz_cuda.so
    start nvcc $gpu -Xcompiler -fPIC,-fvisibility=hidden $pages/csrc/paged.cu -o $pages/src/kvloom_connector_vllm/libkvpaged_cuda.so
    start nvcc $gpu --fmad=false -Xcompiler -fPIC,-ffp-contract=off,-fvisibility=hidden \
        $blend/csrc/rotate.cu -o $blend/src/kvloom_blend/libkvrotate_cuda.so
    start g++ $cpu -shared $pages/csrc/paged.cpp -pthread -o $pages/src/kvloom_connector_vllm/libkvpaged.so
    interface=$(sed -n 's/^_INTERFACE = //p' core/src/kvloom/native.py)
    start g++ $cpu -DKVLOOM_INTERFACE="$interface" -shared plugins/native/csrc/*.cpp -o plugins/native/src/kvloom_native/libkvloom.so
    start g++ $exact -shared $rotate -pthread -o $blend/src/kvloom_blend/libkvrotate.so
    for each in $running; do wait "$each"; done
    g++ -shared "$objects"/*.o -pthread -o $codec/src/kvloom_serde_cachegen/libkvz.so
    "$python" -c 'import bare; from kvloom_serde_cachegen import device; print(device.about()); assert device.library()'
    "$python" -c 'import bare; from kvloom_connector_vllm import native; print(native.about_kernels()); assert native.kernels()'
}

sanitized() { # tool, tests. torch asks for what a driver may not have, and goes on: not an error here
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    "$sanitizer" --tool "$1" --report-api-errors no --error-exitcode 1 \
        "$python" -m pytest -q -p no:cacheprovider -m "not slow" $tests -k "$2"
}

for part in "$@"; do
    case $part in
    build) build ;;
    test) "$python" -m pytest -q -p no:cacheprovider -m "not slow" $tests ;;
    memcheck) # every access of the kernels
        sanitized memcheck "tiles or bad or serializer or lossless or cachegen or C02 or C03 or C10 or C11 or strides" ;;
    racecheck) # who reads what others write in the memory of a block: minutes for a few examples
        sanitized racecheck "writes_the_same or tiles or lossless or C02" ;;
    codec) "$python" bench/codec_gpu.py ;;
    paged) "$python" bench/paged_gpu.py ;;
    esac
done
