#!/bin/bash
# Looks for known holes that our code can reach. The database comes as a Go
# module and is indexed here, so that no other server is asked.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
version=$(cd tools && go list -m -f '{{.Version}}' golang.org/x/vulndb)
db=$tools/vulndb-$version

if [ ! -f "$db/index/db.json" ]; then
  rm -rf "$db.new"
  (cd tools && go build -o "$tools/indexdb" golang.org/x/vulndb/cmd/indexdb)
  "$tools/indexdb" -out "$db.new" -vulns "$(cd tools && go list -m -f '{{.Dir}}' golang.org/x/vulndb)/data/osv"
  rm -rf "$db" && mv "$db.new" "$db"
fi
"$tools/govulncheck" -db "file://$db" ./...
