# `make` without a target prints all targets.

.DEFAULT_GOAL := help
.PHONY: help build release images site demo demo-gateway test judges kube keda real-vllm gpu-fleet soak short race lint vulncheck explore fuzz bench bench-peers bench-path clean

help: ## print all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build both programs into bin/
	CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o bin/ ./cmd/...

release: ## build archives, container images, Helm chart, Python client, bills of materials and SHA256SUMS into bin/release; needs python3
	GOTOOLCHAIN=auto go run ./tools/release

images: ## build the container images for linux/amd64 and linux/arm64 into bin/images, and load the images for this host into a running docker
	go run ./tools/images
	go build -o bin/indexer ./cmd/indexer
	deploy/docker/secrets.sh "$(CURDIR)/bin/indexer" bin/secrets
	@if docker info >/dev/null 2>&1; then \
	  for i in kvatlas nats; do docker load -q -i bin/images/$$i-$$(go env GOARCH).tar || exit 1; done; \
	else echo "docker does not run; bin/images has the archives for docker load, podman load or ctr images import"; fi

site: ## render the documentation as a static site with a search into bin/site
	go run ./tools/site

demo: ## run the demonstration
	go run ./cmd/indexer demo

demo-gateway: ## run a real Envoy before two simulated engines, and print the selected worker for a chat with the reason; fetches Envoy once (100 MB)
	@echo "go run ./tools/gatewaydemo"
	@go run ./tools/gatewaydemo

test: ## run all tests that need only Go
	go test ./...

judges: ## fetch missing components (once, 1.2 GB), then run the tests of clients/python and the tests against real engines, libzmq, Dynamo, Mooncake, Envoy and Kubernetes; KUBE=skip omits Kubernetes
	go run ./integration/judges/fetch
	go test -tags judges -timeout 30m ./integration/judges/engines ./integration/judges/page ./integration/judges/tokenize ./integration/judges/torture ./integration/judges/... ./internal/serve/page ./internal/ingest/zmtp ./tools/pyenv ./tools/path
	go test -tags judges -timeout 30m ./integration/judges/dynamo ./integration/judges/selection -dynamo dynamo-next.txt
	cd integration/judges/helm && go test -count 1 ./...
	@if [ "$(KUBE)" = skip ]; then echo "NOT RUN: make kube, because KUBE=skip"; else $(MAKE) kube; fi

kube: ## build a Kubernetes (once, 15 minutes), then run chart, manifests and docs/kubernetes.md on it; needs root, x86-64 Linux
	go run ./integration/judges/kube/fetch
	go test -tags kube -count 1 -timeout 20m -v ./integration/judges/kube

keda: ## apply the YAML of docs/scaling.md to KEDA's own code and a real indexer; not in make judges: the first build has the SDKs of all clouds (1.2 GB of build cache, sixteen minutes of processor time or more)
	cd integration/judges/keda && go test -count 1 -timeout 10m -v ./...

real-vllm: ## fetch a whole vLLM (once, 1 GB), then compare the answers of vLLM with the index: alone, in a tiny fleet, and behind Envoy: make real-vllm N=60 for fewer requests, GATEWAY=100 for more through Envoy
	go run ./integration/judges/vllm/fetch
	go test -tags realvllm -count 1 -timeout 2h -v ./integration/judges/vllm -vllm.requests=$${N:-300} -vllm.gateway=$${GATEWAY:-20}

gpu-fleet: ## compare selection policies with four vLLM servers on GPUs: truth, reuse, TTFT; never run by CI: make gpu-fleet PYTHON=python3 FLEET="-fleet.gpus=0,1"
	go test -tags realvllm -count 1 -timeout 0 -v ./integration/judges/vllm -run 'TestFleet$$' -fleet.python=$${PYTHON:-python3} $${FLEET}

soak: ## run a cluster of three nodes under load for a long time, and check for growth (make soak T=1h); needs the components of make judges
	go test -tags judges,soak -count 1 -timeout 0 -v ./integration/judges/torture -run TestSoak -soak.for=$${T:-1h}

short: ## run only the quick tests
	go test -short ./...

race: ## run all tests that need only Go under the race detector
	go test -race -vet=off -ldflags=-w -timeout 40m ./...

lint: ## run vet, the format check and staticcheck, also for the judges
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt -w on these files"; exit 1; }
	go vet ./...
	go vet -tags judges,soak ./...
	go vet -tags realvllm ./integration/judges/vllm/...
	go vet -tags kube ./integration/judges/kube/...
	go tool staticcheck -tags judges,soak,realvllm,kube ./...

vulncheck: ## check the code that the programs call for known vulnerabilities; needs vuln.go.dev or the Go module proxy
	go run ./tools/vulncheck

explore: export KVATLAS_TEST_WHOLE = 1
explore: ## run the random tests from new seeds: make explore N=100
	go test ./internal/ingest/shim ./pkg/radix -run 'NothingIsLostOrInvented|SnapshotsMakeUpForEverything|LongHistories' -seed=0 -count=$${N:-10} -timeout 0
	go test ./pkg/routing -seed=0 -count=$${N:-10} -timeout 0
	go test ./internal/operate/dump ./internal/index/node ./pkg/events ./pkg/radix ./pkg/snapshot -rapid.seed=0 -rapid.checks=$$(($${N:-10} * 100)) -timeout 0

fuzz: ## run every fuzz target for a while: make fuzz T=10m
	@for pkg in $$(go list ./...); do \
	  for target in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
	    echo "$$pkg $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $${T:-1m} -fuzzminimizetime 10x $$pkg || exit 1; \
	  done; \
	done

bench: ## run the benchmarks of all packages, with allocations
	go test -run '^$$' -bench . -benchmem ./...

bench-peers: ## build the peers (cargo) and compare the index with the peers, ratios first
	go run ./tools/peers

bench-path: ## install NVIDIA Dynamo's indexer and compare its whole path, from an engine's socket to the answer, with kvatlas
	go run ./tools/path

clean: ## remove all build results
	rm -rf bin
