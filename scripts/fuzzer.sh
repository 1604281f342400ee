#!/bin/sh
# A clang++ with libFuzzer, for the tests that fuzz the native codec. On a CI machine (CI is set, and this is root) it is
# installed from Debian's packages; anywhere else it is up to the user, and without it those tests are skipped.
set -eu

works() {
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
        clang++ -fsanitize=fuzzer,address -x c++ -o /dev/null - 2>/dev/null
}

works && exit 0
if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing clang ..."
    {
        apt-get update -qq
        apt-get install -qq --no-install-recommends clang
        works || apt-get install -qq --no-install-recommends "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
    } >/dev/null 2>&1 </dev/null || true
fi
works || echo "No clang++ with libFuzzer here (Debian: apt-get install clang libclang-rt-14-dev): nothing is fuzzed."
