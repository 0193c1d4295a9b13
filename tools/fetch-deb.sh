#!/bin/bash
# Puts programs of Debian packages into .tools/deb without installing them: no
# service is started, nothing outside .tools is touched, and no root is needed.
# The libraries that this system lacks come along; apt verifies all of it.
# Tests find the programs there by testkit.FindProgram.
#
#   tools/fetch-deb.sh PACKAGE...
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.tools/deb
mkdir -p "$root/.archives"

missing=()
for name in "$@"; do
  [ -e "$root/.have-$name" ] || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "fetch-deb: this system has no apt; install these yourself: ${missing[*]}" >&2
  exit 1
fi

# Two checkouts may share a folder, and two targets may ask at once.
exec 9>"$root/.lock"
flock 9

apt=(apt-get -qq -o Debug::NoLocking=true)
# As root, apt downloads as a user who may not enter every folder.
[ "$(id -u)" -ne 0 ] || apt+=(-o APT::Sandbox::User=root)
# own_lists gives apt a set of package lists of its own, since without root it
# may not renew the system's, which may be absent or name files that are gone.
own_lists() {
  mkdir -p "$root/.apt/lists/partial" "$root/.apt/cache/archives/partial"
  apt+=(-o "Dir::State::lists=$root/.apt/lists" -o "Dir::Cache=$root/.apt/cache")
  "${apt[@]}" update >&2
}

# lacking names a package and what it needs that this system has not; packages
# for all architectures hold data, which no test needs.
lacking() {
  "${apt[@]}" install --simulate --no-install-recommends "$1" |
    awk -v name="$1" '$1 == "Inst" && ($2 == name || !/\[all\]\)/) { print $2 }'
}

fetch() {
  local name=$1 list
  list=$(lacking "$name") || return 1
  rm -rf "$root/.archives/$name"
  mkdir -p "$root/.archives/$name"
  # A package that the system has needs nothing: its programs are in PATH.
  [ -z "$list" ] || (cd "$root/.archives/$name" && "${apt[@]}" download $list) || return 1
}

for name in "${missing[@]}"; do
  if ! fetch "$name"; then
    echo "fetch-deb: trying $name once more with fresh package lists" >&2
    own_lists
    fetch "$name"
  fi
  for deb in "$root/.archives/$name"/*.deb; do
    [ -e "$deb" ] && dpkg-deb -x "$deb" "$root"
  done
  rm -rf "$root/.archives/$name"
  touch "$root/.have-$name"
done
