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

# ---------------------------------------------------------------- images

# The roots that images trust and the gateways of tests and demo use. A real
# fleet gives its own: make images TRUST=DIR GATEWAY=https://HOST:PORT.
TRUST   ?= $(BUILD)/trust
GATEWAY ?=

$(BUILD)/trust: | build
	@[ -d $(BUILD)/keys ] || $(BUILD)/bcd-gateway keys init --out $(BUILD)/keys >/dev/null
	@$(BUILD)/bcd-gateway keys export-trust $@ --keys $(BUILD)/keys >/dev/null

IMAGE = $(GO) run ./image/mkimage -version $(VERSION) -trust $(TRUST) -gateway '$(GATEWAY)' -out $(BUILD)/images

.PHONY: images image-virtual image-metal image-node
images: image-virtual image-metal image-node ## ramdisk images of both profiles, and the installed node's

image-virtual: build $(TRUST) ## kernel, initramfs and UKI for virtual machines, amd64 and arm64
	@$(IMAGE) -profile virtual -bcd $(BUILD)/bcd-amd64 -node-disk
	@$(IMAGE) -profile virtual -arch arm64 -bcd $(BUILD)/bcd-arm64

image-metal: build $(TRUST) ## kernel, initramfs and UKI for servers
	@$(IMAGE) -profile metal -bcd $(BUILD)/bcd-amd64

image-node: build ## the installed node's disk image, by mkosi
	@$(GO) run ./mkosi -bcd $(BUILD)/bcd-amd64 -profile virtual -out $(BUILD)/images

.PHONY: size
size: build image-virtual image-metal ## bytes of bcd and of each image
	@$(GO) run ./image/mkimage -sizes $(BUILD)/images
