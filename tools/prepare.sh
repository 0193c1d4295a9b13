#!/bin/bash
# Installs the system packages that the tests need. Without root it names the
# one command to run and stops.
set -euo pipefail

need=()
command -v protoc >/dev/null || need+=(protobuf-compiler)
command -v chromium >/dev/null || need+=(chromium)
command -v npm >/dev/null || need+=(nodejs npm)
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need+=(postgresql)
command -v git >/dev/null || need+=(git)
command -v curl >/dev/null || need+=(curl)

[ ${#need[@]} -eq 0 ] && exit 0
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
