# The two commands that matter: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION  ?= $(shell cat VERSION)
BUILD    ?= build
GO       ?= go
GOFLAGS_ := -trimpath -buildvcs=false
LDFLAGS  := -s -w -buildid= -X main.version=$(VERSION)
export CGO_ENABLED ?= 0

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Caches are in $${BCD_CACHE:-~/.cache/bcd}; BCD_NO_KVM=1 keeps QEMU from using KVM."

# ---------------------------------------------------------------- building

.PHONY: setup
setup: ## install what is missing on this Debian machine
	@scripts/setup

.PHONY: build
build: ## bcd and bcd-gateway, static and stripped, for amd64 and arm64
	@mkdir -p $(BUILD)
	@for arch in amd64 arm64; do \
		for name in bcd bcd-gateway; do \
			GOOS=linux GOARCH=$$arch $(GO) build $(GOFLAGS_) -ldflags '$(LDFLAGS)' -o $(BUILD)/$$name-$$arch ./cmd/$$name; \
		done; \
	done
	@ln -sf bcd-amd64 $(BUILD)/bcd; ln -sf bcd-gateway-amd64 $(BUILD)/bcd-gateway

.PHONY: generate
generate: ## the contract's Go code, from api/bcd/v1/*.proto
	$(GO) run ./api/gen

.PHONY: docs
docs: ## docs/config.md, docs/man and docs/kinds.md, from the code
	$(GO) test ./cmd/bcd ./cmd/bcd-gateway -run TestDocs -update

# ---------------------------------------------------------------- images

# The roots that images trust and the gateways of tests and demo use. A real
# fleet gives its own: make images TRUST=DIR GATEWAY=https://HOST:PORT.
TRUST   ?= $(BUILD)/trust
GATEWAY ?=

$(BUILD)/trust: | build
	@[ -d $(BUILD)/keys ] || $(BUILD)/bcd-gateway keys init --out $(BUILD)/keys >/dev/null
	@$(BUILD)/bcd-gateway keys export-trust $@ --keys $(BUILD)/keys >/dev/null

IMAGE = $(GO) run ./image/mkimage -version $(VERSION) -trust $(TRUST) -gateway '$(GATEWAY)' -out $(BUILD)/images

.PHONY: images image-virtual image-arm64 image-metal image-node
images: image-virtual image-arm64 image-metal image-node ## ramdisk images of both profiles, and the installed node's

image-virtual: build $(TRUST) ## kernel, initramfs and UKI for virtual machines
	@$(IMAGE) -profile virtual -bcd $(BUILD)/bcd-amd64 -node-disk

image-arm64: build $(TRUST) ## the same for arm64
	@$(IMAGE) -profile virtual -arch arm64 -bcd $(BUILD)/bcd-arm64

image-metal: build $(TRUST) ## kernel, initramfs and UKI for servers
	@$(IMAGE) -profile metal -bcd $(BUILD)/bcd-amd64

image-node: build ## the installed node's disk image, by mkosi
	@$(GO) run ./mkosi -bcd $(BUILD)/bcd-amd64 -profile virtual -out $(BUILD)/images

.PHONY: size
size: build image-virtual image-metal ## bytes of bcd and of each image
	@$(GO) run ./image/mkimage -sizes $(BUILD)
	@$(GO) run ./image/mkimage -sizes $(BUILD)/images

# ---------------------------------------------------------------- checking

STAGE := scripts/stage

.PHONY: test
test: ## everything: set-up, lint, unit tests with -race, images, boot tests
	@$(STAGE) setup scripts/setup
	@$(STAGE) build $(MAKE) --no-print-directory build
	@# Images wait for downloads and unit tests for fsync: side by side.
	@$(STAGE) "images, lint and unit tests" $(MAKE) --no-print-directory -j2 -O stage-images stage-lint stage-unit
	@$(STAGE) "boot tests" $(MAKE) --no-print-directory test-boot

.PHONY: stage-images stage-lint stage-unit
stage-images:
	@$(STAGE) images $(MAKE) --no-print-directory -j1 images
stage-lint:
	@$(STAGE) lint $(MAKE) --no-print-directory lint
stage-unit: | stage-lint
	@$(STAGE) "unit tests" $(MAKE) --no-print-directory test-unit

.PHONY: lint
lint: ## gofmt, go vet and staticcheck, for every build there is
	@bad=$$(git ls-files '*.go' | xargs gofmt -l); [ -z "$$bad" ] || { echo "gofmt would change: $$bad" >&2; exit 1; }
	@$(GO) vet ./...
	@$(GO) vet -tags fakehw,nonvml ./agent/host ./agent/doctor ./cmd/bcd
	@GOARCH=arm64 $(GO) vet ./cmd/...
	@$(GO) tool staticcheck ./...

.PHONY: test-unit
test-unit: ## unit tests with the race detector; those of other builds without
	@# The race runtime sleeps a second at every exit, which re-executing tests do hundreds of times.
	@CGO_ENABLED=1 GORACE=atexit_sleep_ms=0 $(GO) test -race -timeout 15m $$($(GO) list ./... | grep -vE '/qemu-tests(/matrix)?$$')
	@$(GO) test -timeout 5m -tags fakehw,nonvml ./agent/host ./agent/doctor ./cmd/bcd
	@$(GO) test -timeout 5m -tags nonvml ./agent/host ./agent/doctor

.PHONY: test-boot
test-boot: ## whole-image boot tests; BOOT=NAME for one
	@$(GO) test -count=1 -v -timeout 25m ./qemu-tests -run '$(BOOT)' | grep -E --line-buffered '^(=== RUN|--- |FAIL|PASS|ok|panic)|^ +[a-z_]+\.go:' 

.PHONY: test-boot-matrix
test-boot-matrix: ## machines booted from a network, firmware by firmware, as root; BOOT=NAME for one
	@$(GO) test -count=1 -v -timeout 40m ./qemu-tests/matrix -run '$(BOOT)' | grep -E --line-buffered '^ *(=== RUN|--- |FAIL|PASS|ok|panic)|^ +[a-z_]+\.go:'

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (20s)
	@scripts/fuzz $(or $(FUZZTIME),20s)

# ---------------------------------------------------------------- showing

.PHONY: demo
demo: ## a virtual machine from power-on to an installed node, live
	@scripts/setup
	@$(MAKE) --no-print-directory build image-virtual image-node
	@$(GO) run ./qemu-tests/demo -build $(BUILD)

.PHONY: bench-boot
bench-boot: ## power-on to the first Welcome, beside a trivial init on the same kernel
	@scripts/setup
	@$(MAKE) --no-print-directory build image-virtual
	@$(GO) run ./qemu-tests/benchboot -build $(BUILD)

.PHONY: bench-netboot
bench-netboot: ## our TFTP and HTTP beside dnsmasq, tftpd-hpa and nginx, and DHCP answers/s; as root
	@scripts/setup
	@$(GO) run ./netboot/benchnetboot
	@$(GO) test -run '^$$' -bench '^BenchmarkProxyAnswers$$' -benchtime 1x ./netboot/dhcp | awk \
		'/^Benchmark/ { for (i = 3; i <= NF; i++) { if ($$i == "answers/s") rate = $$(i-1); if ($$i == "p99-us") late = $$(i-1) } found = 1; \
		printf "dhcp       answers/s %d p99 %d µs\n", rate, late } END { if (!found) { print "dhcp: the benchmark gave no figures"; exit 1 } }'

.PHONY: clean
clean: ## remove what was built here; caches outside stay
	rm -rf $(BUILD) .demo
