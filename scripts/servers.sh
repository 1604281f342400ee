#!/bin/sh
# The servers that `make test-servers` and examples/cluster start. On a CI machine (CI is set, and this is root) they are
# installed from Debian's packages; anywhere else that is up to the user, and what is missing is skipped.
set -eu
packages="chromium redis-server redis-sentinel redis-tools radosgw ceph-mon ceph-osd ceph-common libibverbs1 libnuma1 libcurl4 iproute2 openssl prometheus"
missing=""
for package in $packages; do
    dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing$missing ..."
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends $missing >/dev/null; } && exit 0
    echo "apt-get could not install all of$missing; the tests of what is missing are skipped" >&2
else
    echo "Not installed:$missing. The tests of what is missing are skipped; on Debian and Ubuntu:" >&2
    echo "  sudo apt-get install --no-install-recommends$missing" >&2
fi
