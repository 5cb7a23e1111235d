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
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
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
