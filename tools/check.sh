#!/bin/bash
# Every check that is not a test: generated files current, formatting, import
# rules, linters, OpenAPI lint, known holes. Prints each step and its time.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
  local name=$1 start=$SECONDS
  shift
  echo "check: $name"
  "$@"
  echo "check: $name ok ($((SECONDS - start)) s)"
}

tidy() { go mod tidy -diff && (cd bench && go mod tidy -diff); }

# generated compares against a copy instead of the index, so that it also
# works in a tree with changes that are not committed yet.
generated() {
  local before after
  before=$(generated_sum)
  make --no-print-directory generate >/dev/null
  after=$(generated_sum)
  if [ "$before" != "$after" ]; then
    echo "generated files were not current; run 'make generate' and commit the result" >&2
    return 1
  fi
}
generated_sum() { cat internal/agentpb/*.pb.go openapi/openapi.json openapi/openapi.yaml | sha256sum; }

format() {
  local bad
  bad=$(gofmt -l $(git ls-files '*.go'))
  [ -z "$bad" ] || { echo "not formatted: $bad" >&2; return 1; }
}

step "go.mod is tidy" tidy
step "formatting" format
step "generated files are current" generated
step "go vet" go vet ./...
step "import rules" go test -count=1 .
step "linters" make --no-print-directory lint
step "OpenAPI lint" make --no-print-directory openapi-lint
step "known holes" make --no-print-directory vuln
echo "check: all ok ($SECONDS s)"
