# Headgate. `make help` lists the targets.
# Both programs and all tests are built with this Go; an older one fetches it.
export GOTOOLCHAIN := go1.27.3
SHELL := /bin/bash
.DEFAULT_GOAL := help

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -X main.version=$(VERSION)
TOOLS := $(CURDIR)/.tools

.PHONY: help run demo test check generate lint build bench chaos soak sim bugs clean prepare test-only test-kills race vuln openapi-lint vendor-web

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: build ## start cluster, controller and one agent here; ARGS="..." goes to `headgate up`
	@bin/headgate up $(ARGS)

demo: build ## the same with five agents (one slow, one flaky) and a history of tasks
	@bin/headgate up --demo $(ARGS)

# What is missing for a test lets it skip, but not here: prepare put it there.
test: export HEADGATE_TEST_COMPLETE := 1
test: prepare check test-only test-kills ## install what is missing, then all checks and all tests

test-only: ## all tests, without installing or checking
	go test ./... -timeout 15m

test-kills: build ## kills of real processes, at the points that matter and at any moment; about two minutes; SEED=
	go test -tags faultpoints ./internal/fault
	cd bench && go run . -bin ../bin -chaos quick-points,quick-campaign $(if $(SEED),-seed $(SEED))

check: ## generated files current, lint, import rules, OpenAPI lint, known holes
	tools/check.sh

generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## protocol code and OpenAPI document
	PATH="$(TOOLS):$$PATH" protoc --go_out=. --go_opt=module=headgate --go-grpc_out=. --go-grpc_opt=module=headgate internal/agentpb/agent.proto
	go run ./openapi/gen

lint: $(TOOLS)/golangci-lint ## the linters of .golangci.yml
	$(TOOLS)/golangci-lint run --allow-parallel-runners ./...

build: ## both programs into bin/
	go build -trimpath -ldflags "$(LDFLAGS)" -o bin/ ./cmd/headgate ./cmd/headgate-agent

bench: build ## figures and ratios, side by side; ONLY=name,... runs a part
	cd bench && go run . -bin ../bin $(if $(ONLY),-only $(ONLY))

chaos: build ## herds, floods, kills and freezes of real processes; a broken promise fails; ONLY=herd,campaign,... KILLS= TASKS= SEED=
	cd bench && go run . -bin ../bin -chaos $(or $(ONLY),all) $(if $(KILLS),-kills $(KILLS)) $(if $(TASKS),-tasks $(TASKS)) $(if $(SEED),-seed $(SEED))

soak: build ## 200 agents, 100 tasks a second and a fault a minute; what grows fails; MINUTES=90 SEED=
	cd bench && go run . -bin ../bin -chaos soak -minutes $(or $(MINUTES),90) $(if $(SEED),-seed $(SEED))

sim: ## the queue in simulated time, with everything that can fail; SEED=n replays one, COUNT=n tries as many
	go test ./tasks -run 'TestSimulation$$' -count=1 -v -timeout 0 -args -sim.seed=$(or $(SEED),0) -sim.count=$(or $(COUNT),0)

bugs: ## build every deliberately broken variant (internal/testkit/bugs) and show that it is caught; ONLY=bug_x,...
	go test ./internal/testkit/bugs -run TestBugs -count=1 -v -timeout 0 -args -bugs=$(or $(ONLY),all)

race: ## all tests under the race detector (slow)
	go test -race ./... -timeout 40m

vuln: $(TOOLS)/govulncheck ## known holes reachable from our code
	tools/vuln.sh

openapi-lint: ## redocly over the committed document
	tools/openapi-lint.sh

prepare: ## what the tests need: system packages (as root, else the command to run), servers into .tools
	tools/prepare.sh

clean: ## remove what was built; data in .headgate stays
	rm -rf bin .tools

$(TOOLS)/protoc-gen-go: go.mod
	go build -o $@ google.golang.org/protobuf/cmd/protoc-gen-go
$(TOOLS)/protoc-gen-go-grpc: go.mod
	go build -o $@ google.golang.org/grpc/cmd/protoc-gen-go-grpc
$(TOOLS)/golangci-lint: tools/go.mod
	cd tools && go build -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(TOOLS)/govulncheck: tools/go.mod
	cd tools && go build -o $@ golang.org/x/vuln/cmd/govulncheck
