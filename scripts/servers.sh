#!/bin/sh
# The servers that `make test-servers` and examples/cluster start.
#   servers.sh VENV check     say in one line what is missing and what installs it
#   servers.sh VENV install   install it: Debian's packages, Azurite (which stands in for Azure), the clients in VENV
#   servers.sh VENV           install it on a CI machine (CI is set, and this is root); elsewhere only the clients
set -u
venv=$1
PATH=$PATH:/usr/sbin:/sbin
programs="chromium:chromium redis-server:redis-server redis-sentinel:redis-sentinel redis-cli:redis-tools radosgw:radosgw
    ceph-mon:ceph-mon ceph-osd:ceph-osd ceph:ceph-common ip:iproute2 openssl:openssl ssh-keygen:openssh-client
    sshd:openssh-server prometheus:prometheus promtool:prometheus npm:npm"
libraries="libibverbs1 libnuma1 libcurl4"
modules="azure.storage.blob boto3 cheroot mooncake moto paramiko webdav4 wsgidav"

missing_packages() {
    for pair in $programs; do
        command -v "${pair%%:*}" >/dev/null || echo "${pair#*:}"
    done
    command -v dpkg-query >/dev/null || return 0
    for library in $libraries; do
        dpkg-query --show --showformat '${Status}' "$library" 2>/dev/null | grep -q "ok installed" || echo "$library"
    done
}

missing_modules() {
    "$venv/bin/python" - $modules <<'PYTHON'
import importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        print(name)
PYTHON
}

has_azurite() {
    [ -x "$venv/bin/azurite-blob" ] || command -v azurite-blob >/dev/null
}

missing() {
    missing_packages | sort -u
    has_azurite || echo azurite
    missing_modules
}

packages() {
    wanted=$(missing_packages | sort -u | tr '\n' ' ')
    [ -n "$wanted" ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "There is no apt-get here; install these as your system does: $wanted" >&2
        return 1
    fi
    root=$([ "$(id -u)" = 0 ] || echo sudo)
    echo "Installing $wanted..."
    { $root apt-get -qq update && $root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install --yes --no-install-recommends $wanted >/dev/null; } ||
        echo "apt-get could not install all of: $wanted" >&2
}

azurite() {
    has_azurite && return 0
    command -v npm >/dev/null || return 0
    echo "Installing Azurite ..."
    timeout 300 npm install --global --prefix "$venv" --no-audit --no-fund --loglevel=error azurite@3.35.0 >/dev/null ||
        echo "npm could not install Azurite" >&2
}

clients() {
    "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --requirement scripts/servers_requirements.txt && return
    echo "pip could not install all of scripts/servers_requirements.txt at once: one by one" >&2
    grep -v '^#' scripts/servers_requirements.txt | while read -r requirement; do
        "$venv/bin/python" -m pip install --quiet --constraint constraints.txt "$requirement" || true
    done
}

case ${2:-} in
    check)
        gone=$(missing | tr '\n' ' ')
        [ -z "$gone" ] || echo "Not installed: ${gone% }. The tests of what is missing are skipped; this installs it: sh scripts/servers.sh $venv install"
        ;;
    install)
        packages
        azurite
        clients
        sh "$0" "$venv" check
        ;;
    *)
        { [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && packages; } || true
        azurite
        clients
        ;;
esac
exit 0
