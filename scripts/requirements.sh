#!/bin/sh
# What this machine can install of requirements-dev.txt: without a C++ compiler, all but the plugins that need one.
set -eu
native=$(for file in $(grep -L "LANGUAGES NONE" plugins/*/csrc/CMakeLists.txt); do echo "-e ${file%/csrc/*}"; done)
if [ -n "${CXX:-}" ] || command -v c++ g++ clang++ >/dev/null; then
    cat requirements-dev.txt
else
    echo "There is no C++ compiler here. These are left out, and their tests: $(echo $native | sed 's/-e //g')" >&2
    echo "$native" | grep --invert-match --line-regexp --fixed-strings --file - requirements-dev.txt
fi
