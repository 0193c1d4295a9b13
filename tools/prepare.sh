#!/bin/bash
# Installs the system packages that the tests need. Without root it names the
# one command to run and stops. Servers that tests only try out, and which
# would start as services if they were installed, go into .tools/deb.
set -euo pipefail
cd "$(dirname "$0")/.."

# fetch_servers needs no root, so it also runs when nothing is to be installed.
fetch_servers() {
  local need=() name
  for name in "$@"; do
    command -v "${name#*:}" >/dev/null || [ -x "/usr/sbin/${name#*:}" ] || need+=("${name%:*}")
  done
  [ ${#need[@]} -eq 0 ] || tools/fetch-deb.sh "${need[@]}"
}
servers=(nginx:nginx haproxy:haproxy prometheus:promtool pgbouncer:pgbouncer) # package:program

need=()
command -v protoc >/dev/null || need+=(protobuf-compiler)
command -v chromium >/dev/null || need+=(chromium)
command -v npm >/dev/null || need+=(nodejs npm)
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need+=(postgresql)
command -v git >/dev/null || need+=(git)
command -v curl >/dev/null || need+=(curl)

if [ ${#need[@]} -eq 0 ]; then
  fetch_servers "${servers[@]}"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "The tests need packages that are not installed. Run this once, then again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y ${need[*]}" >&2
  exit 1
fi
if [[ " ${need[*]} " == *" postgresql "* ]]; then
  # The package shall not make a cluster of its own: the tests start theirs.
  mkdir -p /etc/postgresql-common/createcluster.d
  echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.d/headgate.conf
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${need[@]}"
fetch_servers "${servers[@]}"
