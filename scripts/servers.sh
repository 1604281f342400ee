#!/bin/sh
# The servers that `make test-servers` and examples/cluster start. On a CI machine (CI is set, and this is root) they are
# installed from Debian's packages; anywhere else that is up to the user, and what is missing is skipped. Azurite, which
# stands in for Azure, goes into the environment that is named: servers.sh .venv
set -eu
packages="chromium redis-server redis-sentinel redis-tools radosgw ceph-mon ceph-osd ceph-common libibverbs1 libnuma1 libcurl4 iproute2 openssl openssh-client openssh-server prometheus"
command -v npm >/dev/null || packages="$packages nodejs npm"

from_debian() {
    missing=""
    for package in $packages; do
        dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing$missing ..."
        export DEBIAN_FRONTEND=noninteractive
        { apt-get -qq update && apt-get -qq install --yes --no-install-recommends $missing >/dev/null; } && return 0
        echo "apt-get could not install all of$missing; the tests of what is missing are skipped" >&2
    else
        echo "Not installed:$missing. The tests of what is missing are skipped; on Debian and Ubuntu:" >&2
        echo "  sudo apt-get install --no-install-recommends$missing" >&2
    fi
}

azurite() {
    if ! command -v npm >/dev/null; then
        echo "npm is not installed: no Azurite, and its tests are skipped" >&2
    elif [ ! -x "$1/bin/azurite-blob" ]; then
        echo "Installing Azurite ..."
        timeout 300 npm install --global --prefix "$1" --no-audit --no-fund --loglevel=error azurite@3.35.0 >/dev/null ||
            echo "npm could not install Azurite; its tests are skipped" >&2
    fi
}

from_debian
azurite "$1"
