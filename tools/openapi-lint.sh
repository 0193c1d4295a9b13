#!/bin/bash
# Lints the committed OpenAPI document with redocly. npm keeps what it fetched
# under .tools, so that only the first run needs the registry.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.77.0
prefix=$PWD/.tools/redocly-$version

if [ ! -x "$prefix/node_modules/.bin/redocly" ]; then
  mkdir -p "$prefix"
  npm install --silent --no-audit --no-fund --prefix "$prefix" "@redocly/cli@$version"
fi
REDOCLY_TELEMETRY=off "$prefix/node_modules/.bin/redocly" lint --extends recommended openapi/openapi.json
